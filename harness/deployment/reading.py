"""Reading a deployment: the files of a folder become one `Deployment`, on one clock.

A folder has one log of requests. It may have the engine's settings, a series of its state, and the workload as a trace
with the sharing between prompts. Files that are none of these are named in the notes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from harness.config.errors import UserError
from harness.deployment.log import Deployment, FloatArray, RequestTimes, Timeseries
from harness.deployment.recognising import READERS, Found, read_path
from harness.deployment.rows import LoggedRequest, RequestLog
from harness.deployment.settings import EngineSettings
from harness.deployment.sglang_settings import with_sglang_defaults
from harness.deployment.sharing import trace_of_log
from harness.deployment.stored_blocks import BlockEvents
from harness.deployment.vllm_settings import with_vllm_defaults
from traces.errors import TraceError
from traces.formats.files import SourceFile
from traces.trace import Trace

T = TypeVar("T")
_IGNORED = ("LICENSE", "LICENCE", "README", "README.md", "NOTICE")
_COARSE_S, _FINE_S = 0.5, 0.01  # steps of the search for the clock of a series
_MOST_SHIFTS = 10_000
_LONGEST_S = 86_400.0  # of a request; a longer one is a mix of clocks or of units
_LATEST_S = 1e11  # the year 5138 of a wall clock in seconds; a wall clock in milliseconds is beyond


class DeploymentError(TraceError, UserError):
    """A log or a file of settings that cannot be used, placed as a `TraceError` is.

    Its message says which file, line and field is wrong, and what was expected there. In a file that holds one JSON
    value `field` is the path inside it.
    """


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
    found = Found()
    files = _files(folder)
    for path in files:
        read_path(path, found, alone=len(files) == 1)
    logs = found.requests or found.printed_requests
    log = _only(folder, [(log.file, log) for log in logs], "log of requests")
    if log is None:
        raise DeploymentError(
            str(folder),
            None,
            None,
            " ".join([f"no log of requests in it; a reader knows {', '.join(READERS)}.", *found.notes[:3]]),
        )
    rows, origin = _sorted_rows(log)
    times = _times(log, rows, origin)
    notes = [*found.notes, *log.notes]
    workload = _only(folder, found.workloads, "workload")
    events = _only(folder, found.events, "file of KV events")
    if workload is None:
        trace, sharing = trace_of_log(log, rows, times, found.prompts, events)
    else:
        trace, sharing = _matched(workload, log, rows, times), _unused(events)
    series = _only(folder, found.series or found.printed, "series")
    if series is not None:
        series, note = _on_clock(series, times)
        notes.append(note)
    settings = _merged_settings(found, log, events)
    return Deployment(
        folder.resolve().name,
        settings,
        times,
        trace,
        series,
        tuple(_names(found)),
        log.dropped,
        (*notes, *_assumptions(times), *sharing),
    )


def _files(folder: Path) -> list[Path]:
    if not folder.exists():
        raise DeploymentError(str(folder), None, None, "no such file or folder")
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _IGNORED)


def _names(found: Found) -> list[str]:
    files = [log.file for log in found.requests or found.printed_requests]
    files += [file for group in (found.settings, found.series, found.workloads) for file, _ in group]
    return list(dict.fromkeys([*(file.name for file in files), *(path.name for path, _ in found.events)]))


def _only(folder: Path, found: Sequence[tuple[SourceFile | Path, T]], what: str) -> T | None:
    if len(found) > 1:
        names = ", ".join(file.name for file, _ in found)
        raise DeploymentError(str(folder), None, None, f"more than one {what}: {names}; keep one of them")
    return found[0][1] if found else None


def _sorted_rows(log: RequestLog) -> tuple[list[LoggedRequest], float]:
    """The rows in the order in which they entered the queue, and the first arrival on the clock of the file."""
    if not log.rows:
        counted = ", ".join(f"{count:,} {reason}" for reason, count in log.dropped.items()) or "none at all"
        raise TraceError(log.file.path, None, None, f"no finished request: {counted}")
    log.rows = list(_once(log))
    for row in log.rows:
        _check_order(log.file, row)
    rows = sorted(log.rows, key=lambda row: row.arrival_s if row.queued_s is None else row.queued_s)
    return rows, min(row.arrival_s for row in rows)


def _once(log: RequestLog) -> Iterator[LoggedRequest]:
    """The rows without those that stand in the file again under the same name and with the same times."""
    seen: set[tuple[str, float, float, float]] = set()
    for row in log.rows:
        key = (row.request_id, row.arrival_s, row.first_token_s, row.last_token_s)
        if row.request_id and key in seen:
            log.drop("written twice, with the same times")
            continue
        seen.add(key)
        yield row


def _check_order(file: SourceFile, row: LoggedRequest) -> None:
    stations = [("arrival", row.arrival_s), ("queued", row.queued_s), ("scheduled", row.scheduled_s)]
    stations += [("first token", row.first_token_s), ("last token", row.last_token_s)]
    known = [(name, time) for name, time in stations if time is not None]
    for (earlier, before), (later, after) in pairwise(known):
        if after < before:
            reason = f"the {later} is {before - after:.6g} s before the {earlier}"
            raise TraceError(file.path, row.line, f"request {row.request_id}", reason)
    place = f"request {row.request_id}"
    if max(abs(row.arrival_s), abs(row.last_token_s)) > _LATEST_S:
        reason = (
            f"the arrival {row.arrival_s:.6g} is no time in seconds; convert milliseconds or less to seconds"
        )
        raise TraceError(file.path, row.line, place, reason)
    if row.last_token_s - row.arrival_s > _LONGEST_S:
        reason = (
            f"its last token is {row.last_token_s - row.arrival_s:.6g} s after its arrival, more than a day; all times "
            "must be seconds of one clock"
        )
        raise TraceError(file.path, row.line, place, reason)


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


def _matched(workload: Trace, log: RequestLog, rows: Sequence[LoggedRequest], times: RequestTimes) -> Trace:
    """The workload's prompts at the log's times. Its i-th request is the i-th row of the log's file."""
    read = log.read
    if len(workload.requests) != read:
        reason = f"{len(workload.requests):,} requests, but {log.file.name} has {read:,}"
        raise TraceError(workload.header.source, None, None, reason)
    if log.dropped:
        reason = f"{sum(log.dropped.values())} rows of {log.file.name} are left out, so that they cannot be matched"
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
    """The series on the clock of the requests: shifted to where the requests' own times give its running counts.

    Its clock has another origin, and often another zone, so that only the counts can tell. A constant count, or a
    series beside the requests, cannot: then the error in the note is large, or the shift is one of many.
    """

    def error(shift: float) -> float:
        return float(np.abs(times.under_way(series.at_s + shift)[0] - series.running).mean())

    first, last = float(times.entered_s.min()), float(times.last_token_s.max())
    low, high = first - float(series.at_s[-1]), last - float(series.at_s[0])
    coarse = np.linspace(low, high, min(_MOST_SHIFTS, int((high - low) / _COARSE_S) + 2))
    near = float(coarse[int(np.argmin([error(shift) for shift in coarse]))])
    fine = near + np.linspace(-2 * _COARSE_S, 2 * _COARSE_S, int(4 * _COARSE_S / _FINE_S) + 1)
    errors = [error(shift) for shift in fine]
    best = int(np.argmin(errors))
    note = (
        f"series: shifted by {fine[best]:+.2f} s, where the running requests counted from the times of the requests "
        f"differ least from the logged ones, by {errors[best]:.2f} in the mean."
    )
    return replace(series, at_s=series.at_s + fine[best]), note


def _merged_settings(found: Found, log: RequestLog, events: BlockEvents | None) -> EngineSettings:
    """The settings of all files. What an engine printed or found out wins over what it was told.

    Raises:
        TraceError: two files contradict each other.
    """
    merged = EngineSettings()
    for file, settings in found.settings:
        known, said = merged.given(), settings.given()
        for name in known.keys() & said.keys():
            if known[name] != said[name] and name not in ("model", "version"):
                reason = f"{said[name]}, but {merged.origin.get(name, 'another file')} says {known[name]}"
                raise TraceError(file.path, None, name, reason)
        merged = merged.filled(settings)
    if merged.model is None and "model_id" in log.facts:
        merged = merged.changed(log.file.name, model=str(log.facts["model_id"]))
    if events is not None:  # only a prefix cache has events
        shown = {"block_size": events.block_size, "prefix_caching": True}
        missing = {name: value for name, value in shown.items() if name not in merged.given()}
        merged = merged.changed(events.file, **missing)
    return with_sglang_defaults(with_vllm_defaults(merged))


def _unused(events: BlockEvents | None) -> tuple[str, ...]:
    return (
        () if events is None else (f"{events.file}: KV events, not used: the workload says what is shared.",)
    )


_LONG_S = 1.0  # before a queue, or of the shortest time to a first token: more says that two clocks were read


def _assumptions(times: RequestTimes) -> list[str]:
    found = []
    if times.queued_s is None:
        found.append(
            "requests: the log has no time of the scheduler's queue, so the time to first token counts from the "
            "arrival and includes what the server does before."
        )
    else:
        delay = float(np.median(times.queued_s - times.arrival_s))
        if delay > _LONG_S:
            found.append(
                f"requests: the scheduler's queue is entered {delay:.3g} s after the arrival in the median; if that is "
                "another clock, only times from the queue on can be trusted."
            )
    shortest = float(times.ttft_s.min())
    if shortest > _LONG_S:
        found.append(
            f"requests: no request had its first token within {shortest:.3g} s, not even the first; if arrivals are of "
            "another clock than first tokens, so much of each time to first token is no waiting."
        )
    return found
