"""Logs of load generators and engines that were cut, edited or are of another version: read, or refused by name."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tiers import tier

from harness.twin.reading import EngineLogError, read_engine_log

DATA = Path(__file__).resolve().parents[2] / "data" / "deployments"
LOGS = {
    "guidellm": DATA / "guidellm" / "benchmarks.json",
    "aiperf": DATA / "aiperf" / "profile_export.jsonl",
    "sglang-json": DATA / "sglang" / "requests-json.log",
    "sglang-text": DATA / "sglang" / "requests-text.log",
    "vllm-bench": DATA / "vllm-bench" / "result.json",
}
WRONG: tuple[Any, ...] = (None, "text", "", -1, 0, 1e300, 10**400, True, [], {}, [None], float("nan"))


def read(folder: Path, name: str, content: bytes) -> str:
    """Read a folder with this file alone: `read`, or the refusal, which must name the file."""
    file = folder / LOGS[name].name
    file.write_bytes(content)
    try:
        read_engine_log(folder)
    except EngineLogError as error:
        said = str(error)
    else:
        return "read"
    assert file.name in said or str(folder) in said
    return said


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a document; of lists the first two items alone."""
    yield place
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*place, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from leaves(value[index], (*place, index))


def changes(document: Any) -> Iterator[Any]:
    """The document with one value replaced or taken out; each place has another wrong value."""
    for number, place in enumerate(leaves(document)):
        if not place:
            continue
        for shift in range(tier(1, 2)):
            changed = deepcopy(document)
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = WRONG[(5 * number + shift) % len(WRONG)]
            yield changed
        if isinstance(inside, dict):
            changed = deepcopy(changed)
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            del inside[place[-1]]
            yield changed


@pytest.mark.parametrize("name", ["guidellm", "vllm-bench"])
def test_a_document_with_one_wrong_value_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    document = json.loads(LOGS[name].read_text())
    found = [read(tmp_path, name, json.dumps(changed).encode()) for changed in changes(document)]
    assert "read" in found
    assert any(said != "read" for said in found)


@pytest.mark.parametrize("name", ["aiperf", "sglang-json"])
def test_a_line_with_one_wrong_value_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    lines = LOGS[name].read_text().splitlines()
    at = 1 + next(i for i, line in enumerate(lines[1:]) if "request.finished" in line or '"metrics"' in line)
    start = lines[at].index("{")
    for changed in changes(json.loads(lines[at][start:])):
        mixed = [*lines[:at], lines[at][:start] + json.dumps(changed), *lines[at + 1 :]]
        said = read(tmp_path, name, "\n".join(mixed).encode())
        assert said == "read" or f":{at + 1}:" in said or "no finished request" in said or "clock" in said, (
            said
        )


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_was_cut_anywhere_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = LOGS[name].read_bytes()
    found = {read(tmp_path, name, whole[:cut]) for cut in range(0, len(whole), max(1, len(whole) // 40))}
    assert any(said != "read" for said in found)


@pytest.mark.parametrize("name", LOGS)
def test_an_empty_log_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert "empty file" in read(tmp_path, name, b"")


def test_failed_requests_of_aiperf_are_counted_beside_those_that_ended(tmp_path: Path) -> None:
    lines = LOGS["aiperf"].read_text().splitlines()
    failed = json.loads(lines[1]) | {"error": {"code": 503, "message": "busy"}, "metrics": {}}
    (tmp_path / "profile_export.jsonl").write_text("\n".join([lines[0], json.dumps(failed), *lines[2:]]))
    assert read_engine_log(tmp_path).dropped["failed"] == 1


def test_failed_requests_of_guidellm_are_counted_beside_those_that_ended(tmp_path: Path) -> None:
    document = json.loads(LOGS["guidellm"].read_text())
    requests = document["benchmarks"][0]["requests"]
    requests["errored"] = [requests["successful"].pop()]
    document["benchmarks"][0].pop("metrics", None)
    (tmp_path / "benchmarks.json").write_text(json.dumps(document))
    assert read_engine_log(tmp_path).dropped["errored"] == 1
