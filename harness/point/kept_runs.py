"""Measured runs of a point that has not ended: each is kept as it ends, so that a later start goes on behind it.

A file holds one run: the arrays of its log and recording as NumPy writes them, the rest as JSON, with a digest before
it. Nothing is pickled. The folder goes when the point is committed (`harness.store.commit`).
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from engine.core.plan import StepResult
from harness.metrics.log import RunLog
from harness.replay.recorder import MeasuredRun, PlanRecording
from harness.store.atomic import write_files
from harness.store.commit import digest_of

_TABLES = ("steps", "requests", "lookups", "residency", "waste")  # of a log; the last three may be missing
_GAPS = ("itl_s", "itl_weight")
_NUMBERS = ("block_size", "capacity_slots", "kv_bytes_per_token", "span_s", "replicas", "optimal_hit_tokens")


@dataclass(frozen=True)
class KeptRun:
    """A measured run, when it was taken (seconds since 1970), and what tells the pace of the device beside it."""

    run: MeasuredRun
    begun_s: float
    ended_s: float
    reference: tuple[float, ...] | None  # the yardstick's seconds to which its times are relative
    probe_s: float | None


def keep_run(folder: Path, number: int, kept: KeptRun) -> None:
    """Write run `number` of a point.

    Raises:
        StoreError: the store cannot be written.
    """
    log, recording = kept.run.log, kept.run.recording
    tables = {name: getattr(log, name) for name in _TABLES}
    arrays = {f"{name}/{key}": one for name, table in tables.items() for key, one in (table or {}).items()}
    arrays |= {name: getattr(log, name) for name in _GAPS}
    arrays |= {"features": recording.features, "step_ns": np.array(recording.step_ns, np.int64)}
    if log.kv_events is not None:
        arrays["kv_events"] = np.frombuffer(log.kv_events, np.uint8)
    facts = {
        "log": {name: getattr(log, name) for name in _NUMBERS},
        "tables": [name for name, table in tables.items() if table is not None],
        "digests": recording.digests,
        "drafted": recording.drafted,
        "results": [_plain_result(result) for result in recording.results],
        "chosen": recording.chosen,
        "audits": kept.run.audits,
        "yardstick_s": kept.run.yardstick_s,
        "reference": kept.reference,
        "begun_s": kept.begun_s,
        "ended_s": kept.ended_s,
        "probe_s": kept.probe_s,
    }
    sink = io.BytesIO()
    text = json.dumps(facts, default=lambda number: number.item()).encode()
    np.savez(sink, allow_pickle=False, facts=np.frombuffer(text, np.uint8), **arrays)
    data = sink.getvalue()
    write_files(folder, {f"{number}.run": digest_of(data).encode() + data})


def read_runs(folder: Path) -> list[KeptRun]:
    """The runs 0, 1, … that are whole; one that was damaged, and what follows it, is measured again."""
    return list(_whole_runs(folder))


def _whole_runs(folder: Path) -> Iterator[KeptRun]:
    number = 0
    while (file := folder / f"{number}.run").is_file():
        try:
            yield _run_of(file.read_bytes())
        except (OSError, ValueError, KeyError, TypeError, MemoryError, BadZipFile):
            return
        number += 1


def _run_of(data: bytes) -> KeptRun:
    digest, content = data[:32], data[32:]
    if digest_of(content).encode() != digest:
        raise ValueError("damaged")
    if any(part.compress_type != ZIP_STORED for part in ZipFile(io.BytesIO(content)).infolist()):
        raise ValueError("compressed, which could unpack to anything")
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    facts = json.loads(arrays.pop("facts").tobytes())
    events = arrays.get("kv_events")
    log = RunLog(
        **{name: _columns(arrays, name) if name in facts["tables"] else None for name in _TABLES},  # type: ignore[arg-type]
        **{name: arrays[name] for name in _GAPS},
        **facts["log"],
        kv_events=None if events is None else events.tobytes(),
    )
    recording = PlanRecording(_by_request(facts["chosen"]))
    recording.digests, recording.step_ns = facts["digests"], arrays["step_ns"].tolist()
    recording.drafted = [_by_request(each) for each in facts["drafted"]]
    recording.results = [_result_of(each) for each in facts["results"]]
    recording.features = arrays["features"]
    yardstick, reference = (
        None if facts[name] is None else tuple(facts[name]) for name in ("yardstick_s", "reference")
    )
    run = MeasuredRun(log, recording, facts["audits"], yardstick)
    return KeptRun(run, facts["begun_s"], facts["ended_s"], reference, facts["probe_s"])


def _columns(arrays: Mapping[str, Any], table: str) -> dict[str, Any]:
    start = f"{table}/"
    return {name.removeprefix(start): column for name, column in arrays.items() if name.startswith(start)}


def _by_request(value: Mapping[str, Any]) -> dict[int, Any]:
    return {int(request): each for request, each in value.items()}


def _plain_result(result: StepResult) -> Sequence[Any]:
    ended = {request: sorted(branches) for request, branches in result.ended.items()}
    return result.num_steps, result.parents, sorted(result.finished), ended, result.accepted


def _result_of(value: Sequence[Any]) -> StepResult:
    steps, parents, finished, ended, accepted = value
    branches = {request: frozenset(each) for request, each in _by_request(ended).items()}
    return StepResult(steps, _by_request(parents), frozenset(finished), branches, _by_request(accepted))
