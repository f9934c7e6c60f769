"""`bench sim` simulates what it says, both ways alike, and prints figures of it."""

import json
from pathlib import Path

import pytest

from harness.bench.sim.runner import (
    bench_config,
    bench_workload,
    endless,
    endless_lengths,
    simulate_once,
    simulate_sharing,
)
from harness.cli.main import main


def test_lengths_are_those_of_the_requests_however_often_the_trace_is_repeated() -> None:
    workload = bench_workload(bench_config(None, 6.45))
    rows = len(workload.trace.requests)
    count = 2 * rows + 5
    lengths = endless_lengths(workload, count)
    requests = list(endless(workload, count))
    for place in (0, 1, rows - 1, rows, 2 * rows, count - 1):
        timed = requests[place]
        assert lengths.request_id[place] == timed.request.request_id
        assert lengths.arrival_ns[place] == timed.arrival_ns
        assert lengths.prompt_tokens[place] == timed.request.prompt_tokens
        assert lengths.output_tokens[place] == timed.request.output_tokens
    assert len(lengths.prompt_tokens) == count


def test_both_ways_do_the_same_work() -> None:
    compiled, core = (simulate_once(None, 6.45, 150, through_core) for through_core in (False, True))
    assert (compiled.finished, compiled.steps, compiled.sequence_steps) == (
        core.finished,
        core.steps,
        core.sequence_steps,
    )


def test_the_command_prints_and_writes_a_line_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sim.json"
    code = main(["bench", "sim", "--requests", "20", "40", "--repeats", "1", "--json", str(out)])
    assert code == 0
    told = capsys.readouterr().out
    assert "replayed compiled" in told
    assert "peak memory grew by" in told
    assert [timing["finished"] for timing in json.loads(out.read_text())] == [20, 40]


@pytest.mark.parametrize("shared", ["workload.prefix_share=0.5", "decoding.n=3", "decoding.beam_width=2"])
def test_both_ways_do_the_same_work_where_requests_share_blocks(shared: str) -> None:
    compiled, core = (simulate_sharing(20.0, 150, through_core, [shared]) for through_core in (False, True))
    assert (compiled.finished, compiled.steps, compiled.sequence_steps) == (
        core.finished,
        core.steps,
        core.sequence_steps,
    )


@pytest.mark.parametrize(
    "words", [["--share", "2"], ["--samples", "0"], ["--samples", "2", "--beams", "2"]], ids=" ".join
)
def test_sharing_that_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", *words]) == 2
    assert "bench sim: --s" in capsys.readouterr().err


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--requests", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["nan", "inf", "0"])
def test_a_rate_that_is_none_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--rate", rate]) == 2
    assert "--rate greater than 0" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_named_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "sim", "--requests", "5", "--json", "no-such-folder/sim.json"]) == 2
    told = capsys.readouterr()
    assert "there is no folder 'no-such-folder'" in told.err
    assert told.out == ""


def test_a_trace_may_have_a_comma_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "a, b's=1.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,300,40\n")
    assert simulate_once(str(file), 6.45, 3, True).finished == 3
