"""`bench sim` simulates what it says, both ways alike, and prints figures of it."""

import json
from pathlib import Path

import pytest

from harness.bench.sim.measuring import simulate_once
from harness.bench.sim.workload import bench_config, bench_workload, endless, endless_lengths
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


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--requests", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
