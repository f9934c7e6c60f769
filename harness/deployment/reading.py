"""Reading a deployment: the files of a folder, each recognised by its content, become one `Deployment`.

A folder has one log of requests. It may have the engine's settings, a series of its state, and the workload as a trace
with the sharing between prompts. Files that are none of these are named in the notes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.deployment.errors import DeploymentError
from harness.deployment.log import Deployment, FloatArray, RequestTimes, Timeseries
from harness.deployment.recorder_log import read_recorded_requests, read_recorded_series
from harness.deployment.rows import LoggedRequest, RequestLog
from harness.deployment.settings import EngineSettings, settings_of
from traces.errors import TraceError
from traces.formats.files import SourceFile, open_source
from traces.reading import read_trace
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest

T = TypeVar("T")
_IGNORED = ("LICENSE", "LICENCE", "README", "README.md", "NOTICE")
_FARTHEST_S = 30.0  # how far the clock of a series may be from that of the requests


@dataclass
class _Found:
    """What the files of a folder turned out to be."""

    requests: list[RequestLog] = field(default_factory=list)
    series: list[tuple[SourceFile, Timeseries]] = field(default_factory=list)
    workloads: list[tuple[SourceFile, Trace]] = field(default_factory=list)
    settings: list[tuple[SourceFile, EngineSettings]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_deployment(folder: Path) -> Deployment:
    """The deployment that a folder (or one file of requests) describes.

    Raises:
        DeploymentError: a file is malformed (file, line and field are named), there is no log of requests or more than
            one, or the files contradict each other.
    """
    try:
        return _deployment(folder)
    except TraceError as error:
        raise DeploymentError(error.file, error.line, error.field, error.reason) from error


def _deployment(folder: Path) -> Deployment:
    found = _Found()
    for path in _files(folder):
        _read_file(open_source(path), found)
    log = _only(folder, [(log.file, log) for log in found.requests], "log of requests")
    if log is None:
        raise DeploymentError(
            str(folder), None, None, f"no log of requests in it; a reader knows {', '.join(_READERS)}"
        )
    rows, origin = _sorted_rows(log)
    times = _times(log, rows, origin)
    notes = [*found.notes, *log.notes]
    workload = _only(folder, found.workloads, "workload")
    trace = _trace_of_log(log, rows, times) if workload is None else _matched(workload, log, rows, times)
    series = _only(folder, found.series, "series")
    if series is not None:
        series, note = _on_clock(series, times)
        notes.append(note)
    settings = _only(folder, found.settings, "file of settings") or EngineSettings()
    return Deployment(
        folder.resolve().name,
        settings,
        times,
        trace,
        series,
        tuple(_names(found)),
        log.dropped,
        tuple(notes + _assumptions(times, workload is not None)),
    )


def _files(folder: Path) -> list[Path]:
    if not folder.exists():
        raise DeploymentError(str(folder), None, None, "no such file or folder")
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _IGNORED)


def _names(found: _Found) -> list[str]:
    files = [log.file for log in found.requests]
    files += [file for group in (found.settings, found.series, found.workloads) for file, _ in group]
    return [file.name for file in files]


def _only(folder: Path, found: Sequence[tuple[SourceFile, T]], what: str) -> T | None:
    if len(found) > 1:
        names = ", ".join(file.name for file, _ in found)
        raise DeploymentError(str(folder), None, None, f"more than one {what}: {names}; keep one of them")
    return found[0][1] if found else None


_Reader = Callable[[SourceFile, _Found], None]


def _read_file(file: SourceFile, found: _Found) -> None:
    reader = _recognised(file)
    if reader is None:
        found.notes.append(f"{file.name}: not read, its content is of no known kind.")
        return
    reader(file, found)


def _recognised(file: SourceFile) -> _Reader | None:
    head = file.first_line.strip()
    return next((read for recognise, read in _READERS.values() if recognise(file, head)), None)


def _first_object(head: str) -> Mapping[str, Any]:
    try:
        record = json.loads(head)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _recorded(file: SourceFile, found: _Found) -> None:
    found.requests.append(read_recorded_requests(file))


def _series(file: SourceFile, found: _Found) -> None:
    series, notes = read_recorded_series(file)
    found.series.append((file, series))
    found.notes += notes


def _workload(file: SourceFile, found: _Found) -> None:
    found.workloads.append((file, read_trace(file.path, "pagetwin")))


def _settings(file: SourceFile, found: _Found) -> None:
    found.settings.append((file, settings_of(file)))


_READERS: dict[str, tuple[Callable[[SourceFile, str], bool], _Reader]] = {
    "requests.jsonl of LLMServingSim's recorder": (
        lambda file, head: {"input_toks", "queued_ts"} <= _first_object(head).keys(),
        _recorded,
    ),
    "its timeseries.csv": (lambda file, head: head.startswith("t,prompt_throughput,"), _series),
    "a trace of PageTwin": (lambda file, head: "header" in _first_object(head), _workload),
    "engine.json or meta.json": (
        lambda file, head: file.name.endswith(".json") and head == "{",
        _settings,
    ),
}


def _sorted_rows(log: RequestLog) -> tuple[list[LoggedRequest], float]:
    """The rows in the order in which they entered the queue, and the first arrival on the clock of the file."""
    if not log.rows:
        counted = ", ".join(f"{count:,} {reason}" for reason, count in log.dropped.items()) or "none at all"
        raise TraceError(log.file.path, None, None, f"no finished request: {counted}")
    for row in log.rows:
        _check_order(log.file, row)
    rows = sorted(log.rows, key=lambda row: row.arrival_s if row.queued_s is None else row.queued_s)
    return rows, min(row.arrival_s for row in rows)


def _check_order(file: SourceFile, row: LoggedRequest) -> None:
    stations = [("arrival", row.arrival_s), ("queued", row.queued_s), ("scheduled", row.scheduled_s)]
    stations += [("first token", row.first_token_s), ("last token", row.last_token_s)]
    known = [(name, time) for name, time in stations if time is not None]
    for (earlier, before), (later, after) in pairwise(known):
        if after < before:
            reason = f"the {later} is {before - after:.6g} s before the {earlier}"
            raise TraceError(file.path, row.line, f"request {row.request_id}", reason)


def _times(log: RequestLog, rows: Sequence[LoggedRequest], origin: float) -> RequestTimes:
    def column(name: str) -> FloatArray | None:
        values = [getattr(row, name) for row in rows]
        return None if any(value is None for value in values) else np.array(values, np.float64) - origin

    cached = [row.cached_tokens for row in rows]
    arrival, first, last = (column(name) for name in ("arrival_s", "first_token_s", "last_token_s"))
    assert arrival is not None
    assert first is not None
    assert last is not None
    return RequestTimes(
        tuple(row.request_id for row in rows),
        arrival,
        first,
        last,
        np.array([row.prompt_tokens for row in rows], np.int64),
        np.array([row.output_tokens for row in rows], np.int64),
        column("queued_s"),
        column("scheduled_s"),
        None if None in cached else np.array(cached, np.int64),
    )


def _arrivals_us(times: RequestTimes) -> list[int]:
    return [round(value * 1e6) for value in times.entered_s]


def _trace_of_log(log: RequestLog, rows: Sequence[LoggedRequest], times: RequestTimes) -> Trace:
    """The requests as a trace without shared prompts."""
    requests = tuple(
        TraceRequest(i, at_us, row.prompt_tokens, row.output_tokens, (Segment(None, row.prompt_tokens),))
        for i, (row, at_us) in enumerate(zip(rows, _arrivals_us(times), strict=True))
    )
    header = TraceHeader(
        log.file.name,
        log.format,
        log.file.name,
        CHAINED,
        None,
        1,
        log.file.sha256,
        log.read,
        len(rows),
        log.dropped,
    )
    return Trace(header, requests)


def _matched(workload: Trace, log: RequestLog, rows: Sequence[LoggedRequest], times: RequestTimes) -> Trace:
    """The workload's prompts at the log's times. Its i-th request is the i-th row of the log's file."""
    read = log.read
    if len(workload.requests) != read:
        reason = f"{len(workload.requests):,} requests, but {log.file.name} has {read:,}"
        raise TraceError(workload.header.source, None, None, reason)
    if log.dropped:
        reason = f"{sum(log.dropped.values())} rows of {log.file.name} did not finish, so that they cannot be matched"
        raise TraceError(workload.header.source, None, None, reason)
    place = {id(row): index for index, row in enumerate(log.rows)}
    requests = []
    for number, (row, at_us) in enumerate(zip(rows, _arrivals_us(times), strict=True)):
        request = workload.requests[place[id(row)]]
        if (request.prompt_tokens, request.output_tokens) != (row.prompt_tokens, row.output_tokens):
            reason = (
                f"{row.prompt_tokens} prompt and {row.output_tokens} output tokens, but request "
                f"{request.request_id} of the workload has {request.prompt_tokens} and {request.output_tokens}"
            )
            raise TraceError(log.file.path, row.line, f"request {row.request_id}", reason)
        requests.append(replace(request, request_id=number, arrival_us=at_us))
    return workload.changed(tuple(requests), f"arrivals as measured in {log.file.name}")


def _on_clock(series: Timeseries, times: RequestTimes) -> tuple[Timeseries, str]:
    """The series on the clock of the requests: shifted to where the requests' own times give its running counts."""
    shifts = np.arange(-_FARTHEST_S, _FARTHEST_S + 0.005, 0.01)
    errors = [np.abs(times.under_way(series.at_s + shift)[0] - series.running).mean() for shift in shifts]
    best = int(np.argmin(errors))
    note = (
        f"series: shifted by {shifts[best]:+.2f} s, where the running requests counted from the times of the requests "
        f"differ least from the logged ones, by {errors[best]:.2f} in the mean."
    )
    return replace(series, at_s=series.at_s + shifts[best]), note


def _assumptions(times: RequestTimes, has_workload: bool) -> list[str]:
    found = []
    if times.queued_s is None:
        found.append(
            "requests: the log has no time of the scheduler's queue, so the time to first token counts from the "
            "arrival and includes what the server does before."
        )
    if not has_workload:
        found.append("requests: the log does not say which prompts share a beginning; none is assumed to.")
    return found
