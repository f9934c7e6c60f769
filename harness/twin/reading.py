"""Reading what an engine left: the files of a folder become one `EngineLog`, on one clock.

A folder has one log of requests. It may have the engine's settings, a series of its state, and the workload as a trace
with the sharing between prompts. Each file is recognised by its content and read by the reader of its format. Files
that are none of these are named in the notes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.config.errors import UserError
from harness.twin import exports, printed, settings_files
from harness.twin.client import BoolArray, LogClient, client_of
from harness.twin.exports import BENCH_KEYS, PLAIN_COLUMNS
from harness.twin.inferred import with_ceilings
from harness.twin.log import WRITTEN_TWICE, EngineLog, IntArray, LoggedRequests, Timeseries
from harness.twin.printed import YEAR_S
from harness.twin.probe_log import read_probe
from harness.twin.rows import LATEST_S, LoggedRequest, RequestLog, placed
from harness.twin.scrape import SERIES_COLUMNS, read_series
from harness.twin.settings import EngineSettings, with_sglang_defaults, with_vllm_defaults
from harness.twin.sharing import UNSAID, trace_of_log
from harness.twin.steps import LoggedSteps
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, open_source
from traces.formats.kv_events import is_events
from traces.reading import read_trace
from traces.trace import Trace

T = TypeVar("T")
_IGNORED = ("LICENSE", "LICENCE", "README", "README.md", "NOTICE")
_JSON = (".json", ".jsonl")  # such a file must be what its name says
_LOOK_LINES, _LOOK_BYTES = 3000, 1 << 20  # the part of a file by which it is recognised
_KEY = re.compile(r'"(\w+)"\s*:')
_COARSE_S, _FINE_S = 0.5, 0.01  # steps of the search for the clock of a series
_MOST_SHIFTS = 10_000
_LONGEST_S = 86_400.0  # of a request; a longer one is a mix of clocks or of units
_ONE_TOKEN_S = 0.1  # from the first token to the end of a request of one: the stream's last chunk takes less
_SET_BACK_S = 1.0  # by which a clock goes back from a request to the one that was sent after it
_RARELY = 0.05  # of the requests; more often they stand in another order than they were sent in
_GROWS = 0.9  # of the turns
_BESIDE_S = 10.0  # vLLM prints its state so often
_YEAR_2000_S = datetime(2000, 1, 1, tzinfo=UTC).timestamp()
_APART_S = 2.0  # the clocks of two hosts, in whole seconds
_SUM_S = 0.003  # of an answer, whose tokens vLLM's client counts before it writes the date
_ZONE_S, _ZONES = 900.0, 104  # time zones lie at quarters of an hour, at most 26 hours apart
_ALIKE = 0.5  # of the running requests: two counts of them differ by less, though one has no first chunks
_HITS = 0.05  # of the prompt tokens; fewer change little
_LONG_S = 1.0  # before a queue, or of the shortest time to a first token: more says that two clocks were read


class EngineLogError(TraceError, UserError):
    """A log or a file of settings that cannot be used, placed as a `TraceError` is.

    Its message says which file, line and field is wrong, and what was expected there. In a file that holds one JSON
    value `field` is the path inside it.
    """


def read_engine_log(folder: Path) -> EngineLog:
    """The log that a folder (or one file of requests) holds.

    Raises:
        EngineLogError: a file is malformed (file, line and field are named), there is no log of requests or more than
            one, or the files contradict each other.
    """
    try:
        return _engine_log(folder)
    except TraceError as error:
        raise EngineLogError(error.file, error.line, error.field, error.reason) from error


def _engine_log(folder: Path) -> EngineLog:
    if not folder.exists():
        raise EngineLogError(str(folder), None, None, "no such file or folder")
    if not (folder.is_file() or folder.is_dir()):  # reading a pipe may never end
        raise EngineLogError(str(folder), None, None, "is a pipe or a device; name a file or a folder")
    found, files = _Found(), [folder]
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _IGNORED)
    for path in files:
        _read_path(path, found, alone=len(files) == 1)
    if found.probed:
        _take_probe(found)
    logs = found.requests or found.printed_requests
    log = _only(folder, logs, "log of requests")
    if log is None:
        reason = f"no log of requests in it; a reader knows {', '.join(READERS)}."
        raise EngineLogError(str(folder), None, None, " ".join([reason, *found.notes[:3]]))
    rows, origin = _sorted_rows(log)
    times = _times(rows, origin)
    notes = [*found.notes, *log.notes]
    workload = _only(folder, found.workloads, "workload")
    if workload is None:
        trace, sharing = trace_of_log(log, rows, times, found.prompts)
    else:
        trace, sharing = _matched(workload, log, rows, times), ()
    client = _client(log, rows, times, trace)
    series = _only(folder, found.series or found.printed, "series")
    if series is not None:
        series, said = _on_clock(series, times, _wall_s(log, times, origin))
        notes += said
    said_first = [note for note in notes if note.startswith("Warning: ")]
    groups = (logs, found.settings, found.series, found.workloads)
    return EngineLog(
        folder.resolve().name,
        with_ceilings(_merged_settings(found, log), times, series, trace),
        times,
        client.sends(trace, times),
        series,
        tuple(dict.fromkeys(path.name for group in groups for path, _ in group)),
        log.dropped,
        (*(note for note in notes if note not in said_first), *_assumptions(times), *sharing),
        client.said,
        None if found.steps is None else replace(found.steps, done_s=found.steps.done_s - origin),
        log.assumes_pauses,
        (*said_first, *_doubtful(log, times, series, sharing, client.before)),
    )


def _client(log: RequestLog, rows: Sequence[LoggedRequest], times: LoggedRequests, trace: Trace) -> LogClient:
    cap = log.facts.get("max_concurrency")
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        reason = f"whole number of at least 1 expected, found {cap}"
        raise TraceError(log.file.path, None, "max_concurrency", reason)
    sessions = [row.session for row in rows]
    if not any(sessions):
        sessions = [request.session for request in trace.requests]
    return client_of(times, cap=cap, rate=_rate(log.facts.get("request_rate")), sessions=sessions)


def _rate(stated: object) -> float | None:
    """Requests a second as a log states them; None where it does not."""
    try:
        rate = float(str(stated))
    except ValueError:
        return None
    return rate if rate > 0 else None


def _only(folder: Path, found: Sequence[tuple[Path, T]], what: str) -> T | None:
    if len(found) > 1:
        names = ", ".join(path.name for path, _ in found)
        raise EngineLogError(str(folder), None, None, f"more than one {what}: {names}; keep one of them")
    return found[0][1] if found else None


# -- what each file is ------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """What the files of a folder turned out to be, by path."""

    requests: list[tuple[Path, RequestLog]] = field(default_factory=list)
    printed_requests: list[tuple[Path, RequestLog]] = field(default_factory=list)  # by a server
    series: list[tuple[Path, Timeseries]] = field(default_factory=list)
    printed: list[tuple[Path, Timeseries]] = field(default_factory=list)  # the same, by a server
    workloads: list[tuple[Path, Trace]] = field(default_factory=list)
    settings: list[tuple[Path, EngineSettings]] = field(default_factory=list)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # token ids by request
    probed: list[SourceFile] = field(default_factory=list)  # files of one log of the probe
    steps: LoggedSteps | None = None
    notes: list[str] = field(default_factory=list)


def _read_path(path: Path, found: _Found, *, alone: bool) -> None:
    """Read a file. What is no text is named in the notes, unless it is all there is."""
    if is_events(path):
        found.notes.append(
            f"{path.name}: KV events, not read: they name no request. pagetwin_probe with PAGETWIN_PROBE_HASHES=1 says "
            "what prompts and answers share."
        )
        return
    try:
        file = open_source(path)
    except TraceError as error:
        if alone or path.suffix in _JSON:
            raise
        found.notes.append(f"{path.name}: not read: {error.reason}.")
        return
    head = _Head(file)
    for recognises, read in READERS.values():
        if recognises(head):
            read(file, found)
            return
    _check_json(file)
    found.notes.append(f"{file.name}: not read, its content is of no known kind.")


def _check_json(file: SourceFile) -> None:
    """Raise TraceError if a file that is called .json or .jsonl holds something else, as one that was cut short."""
    if not file.name.endswith(_JSON):
        return
    lines = list(file.lines())
    parts = [(number, line) for number, line in lines if line.strip()]
    if file.name.endswith(".json"):
        parts = [(1, b"\n".join(line for _, line in lines))]
    for number, part in parts:
        try:
            json.loads(part)
        except (ValueError, RecursionError) as error:
            line = number + getattr(error, "lineno", 1) - 1
            reason = f"is no JSON ({error}); mend it or take it out of the folder"
            raise TraceError(file.path, line, None, reason) from None


class _Head:
    """The beginning of a file, by which its kind is recognised."""

    def __init__(self, file: SourceFile) -> None:
        self.name = file.name
        self.first = file.first_line.strip()
        raw = b"\n".join(line for _, line in islice(file.lines(), _LOOK_LINES))
        self.text = raw[:_LOOK_BYTES].decode("utf-8", "replace")

    @property
    def object(self) -> Mapping[str, Any]:
        """The object on the first line, or its outermost keys where the object is cut or spread over lines."""
        try:
            record = json.loads(self.first)
        except (ValueError, RecursionError):
            return dict.fromkeys(_KEY.findall(self.text)) if self.first.startswith("{") else {}
        return record if isinstance(record, dict) else {}

    def has(self, *keys: str) -> bool:
        """Whether the first object has all keys."""
        return set(keys) <= self.object.keys()


_Reader = Callable[[SourceFile, _Found], None]


def _log(read: Callable[[SourceFile], RequestLog]) -> _Reader:
    return lambda file, found: found.requests.append((Path(file.path), read(file)))


def _settings(read: Callable[[SourceFile], EngineSettings]) -> _Reader:
    return lambda file, found: found.settings.append((Path(file.path), read(file)))


def _series(file: SourceFile, found: _Found) -> None:
    series, notes = read_series(file)
    found.series.append((Path(file.path), series))
    found.notes += notes


def _workload(file: SourceFile, found: _Found) -> None:
    found.workloads.append((Path(file.path), read_trace(file.path, "pagetwin")))


def _server_log(file: SourceFile, found: _Found) -> None:
    settings, series, notes = printed.read_server_log(file)
    requests, prompts = printed.read_vllm_requests(file)
    found.prompts |= prompts
    found.notes += notes
    if requests.rows:
        found.printed_requests.append((Path(file.path), requests))
    if settings.given():
        found.settings.append((Path(file.path), settings))
    if series is not None:
        found.printed.append((Path(file.path), series))


def _probed(file: SourceFile, found: _Found) -> None:
    found.probed.append(file)


def _take_probe(found: _Found) -> None:
    """What the files of a probe hold together."""
    log = read_probe(found.probed)
    path = Path(log.requests.file.path)
    found.requests.append((path, log.requests))
    found.settings.append((path, log.settings))
    if log.series is not None:
        found.series.append((path, log.series))
    found.steps = log.steps
    found.notes += log.notes


READERS: dict[str, tuple[Callable[[_Head], bool], _Reader]] = {
    "the log of pagetwin_probe": (lambda head: head.has("pagetwin_probe"), _probed),
    "requests.jsonl of LLMServingSim's recorder":
        (lambda head: head.has("input_toks", "queued_ts"), _log(exports.read_recorded_requests)),
    "its timeseries.csv": (lambda head: head.first.startswith(",".join(SERIES_COLUMNS[:2])), _series),
    "a trace of PageTwin": (lambda head: head.has("header"), _workload),
    "the result of `vllm bench serve --save-detailed`":
        (lambda head: head.has(*BENCH_KEYS), _log(exports.read_bench_result)),
    "OpenTelemetry spans (OTLP JSON, Jaeger)":
        (lambda head: "resourceSpans" in head.object or ("data" in head.object and '"spans"' in head.text),
         _log(exports.read_spans)),
    "a result of inference-engine-benchmark-system":
        (lambda head: head.has(*exports.LEVEL_KEYS), _log(exports.read_levels)),
    "GuideLLM's JSON": (lambda head: head.has("benchmarks"), _log(exports.read_guidellm)),
    "AIPerf's profile_export.jsonl":
        (lambda head: all(f'"{word}"' in head.text for word in ("metadata", "metrics", "request_start_ns")),
         _log(exports.read_aiperf)),
    "SGLang's request log":
        (lambda head: printed.is_sglang_log(head.text), _log(printed.read_sglang_requests)),
    "a CSV of " + ", ".join(PLAIN_COLUMNS):
        (lambda head: {"arrival_s", "first_token_s"} <= set(head.first.split(",")), _log(exports.read_plain)),
    "JSON lines with the same names":
        (lambda head: head.has("arrival_s", "first_token_s"), _log(exports.read_plain)),
    "the engine's arguments as JSON":
        (lambda head: head.first.startswith("{") and settings_files.is_json_settings(head.object),
         _settings(settings_files.read_json_settings)),
    "vLLM's YAML for --config":
        (lambda head: head.name.endswith((".yaml", ".yml")), _settings(settings_files.read_yaml_settings)),
    "a server's log":
        (lambda head: printed.is_server_log(head.text) or printed.is_request_log(head.text), _server_log),
    "a command line":
        (lambda head: settings_files.is_command(head.text), _settings(settings_files.read_command)),
}  # fmt: skip


# -- the requests on one clock ----------------------------------------------------------------------------------------


def _sorted_rows(log: RequestLog) -> tuple[list[LoggedRequest], float]:
    """The rows in the order in which they entered the queue, and the first arrival on the clock of the file."""
    if not log.rows:
        counted = ", ".join(f"{count:,} {reason}" for reason, count in log.dropped.items()) or "none at all"
        raise TraceError(log.file.path, None, None, f"no finished request: {counted}")
    for row in log.rows:
        _check_row(log.file, row)
    log.rows = list(_once(log))
    rows = sorted(log.rows, key=lambda row: row.arrival_s if row.queued_s is None else row.queued_s)
    return rows, min(row.arrival_s for row in rows)


def _once(log: RequestLog) -> Iterator[LoggedRequest]:
    """The rows without those that cannot be, or stand in the file again, by their name and with the same times."""
    seen: set[tuple[str, float, float, float]] = set()
    for row in log.rows:
        key = (row.request_id, row.arrival_s, row.first_token_s, row.last_token_s)
        if row.request_id and key in seen:
            log.add(WRITTEN_TWICE)
            continue
        if row.output_tokens == 1 and row.last_token_s - row.first_token_s > _ONE_TOKEN_S:
            log.add("one token, and an end long after it: its output is counted otherwise")
            continue
        seen.add(key)
        yield row


def _check_row(file: SourceFile, row: LoggedRequest) -> None:
    """Raise TraceError where a request of any format is impossible: nothing in a log is believed or repaired."""
    cached, place = row.cached_tokens or 0, f"request {row.request_id}"
    stations = [("arrival", row.arrival_s), ("queued", row.queued_s), ("scheduled", row.scheduled_s)]
    stations += [("first token", row.first_token_s), ("last token", row.last_token_s)]
    known = [(name, time) for name, time in stations if time is not None]
    with placed(file, row.line):
        if row.prompt_tokens < 1:
            raise RowError("prompt_tokens", f"{row.prompt_tokens} is below 1")
        if not 0 <= cached <= row.prompt_tokens:
            reason = f"is more than prompt_tokens {row.prompt_tokens}" if cached > 0 else "is below 0"
            raise RowError("cached_tokens", f"{cached} {reason}")
        for (earlier, before), (later, after) in pairwise(known):
            if after < before:
                raise RowError(place, f"the {later} is {before - after:.6g} s before the {earlier}")
        if max(abs(row.arrival_s), abs(row.last_token_s)) > LATEST_S:
            reason = "is no time in seconds; convert milliseconds or less to seconds"
            raise RowError(place, f"the arrival {row.arrival_s:.6g} {reason}")
        if row.last_token_s - row.arrival_s > _LONGEST_S:
            late = f"its last token is {row.last_token_s - row.arrival_s:.6g} s after its arrival, more than a day"
            raise RowError(place, f"{late}; all times must be seconds of one clock")


def _times(rows: Sequence[LoggedRequest], origin: float) -> LoggedRequests:
    def column(name: str, start: float | int = 0, kind: type = np.int64) -> Any:
        """All values of a name, less `start`; None where a row has none."""
        values = [getattr(row, name) for row in rows]
        return None if None in values else np.array(values, kind) - start

    names = ("arrival_s", "first_token_s", "last_token_s", "queued_s", "scheduled_s")
    return LoggedRequests(
        request_id=tuple(row.request_id for row in rows),
        **{name: column(name, origin, np.float64) for name in names},
        **{name: column(name) for name in ("prompt_tokens", "output_tokens", "cached_tokens")},
    )


def _matched(workload: Trace, log: RequestLog, rows: Sequence[LoggedRequest], times: LoggedRequests) -> Trace:
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
    for number, (row, at_s) in enumerate(zip(rows, times.entered_s, strict=True)):
        request = workload.requests[place[id(row)]]
        if (request.prompt_tokens, request.output_tokens) != (row.prompt_tokens, row.output_tokens):
            reason = (
                f"{row.prompt_tokens} prompt and {row.output_tokens} output tokens, but request "
                f"{request.request_id} of the workload has {request.prompt_tokens} and {request.output_tokens}"
            )
            raise TraceError(log.file.path, row.line, f"request {row.request_id}", reason)
        requests.append(replace(request, request_id=number, arrival_us=round(float(at_s) * 1e6)))
    return workload.changed(tuple(requests), f"arrivals as measured in {log.file.name}")


def _wall_s(log: RequestLog, times: LoggedRequests, origin: float) -> tuple[float, float] | None:
    """The first arrival on the wall clock of some zone, as a date of the year 2000: not before, and not after.

    A client may log Unix time, or when it had all answers (vLLM's `date`). None: its clock began anywhere.
    """
    if origin >= _YEAR_2000_S:
        wall_s = datetime.fromtimestamp(origin, UTC).replace(year=2000).timestamp()
        return wall_s - _APART_S, wall_s + _APART_S
    try:
        ended = datetime.strptime(f"{log.facts.get('date')} +0000", "%Y%m%d-%H%M%S %z")
    except ValueError:
        return None
    wall_s = ended.replace(year=2000).timestamp() - float(times.last_token_s.max())
    return wall_s - _SUM_S * len(times) - _APART_S, wall_s + _APART_S


def _on_clock(
    series: Timeseries, times: LoggedRequests, wall_s: tuple[float, float] | None
) -> tuple[Timeseries | None, list[str]]:
    """The series on the clock of the requests: shifted to where the requests' own times give its running counts.

    Where both have a wall clock (`wall_s`, `Timeseries.began_s`) it is looked for near it, at first in the same time
    zone; states of other requests are left out, and None is a series of another time. Else, or where nothing fits
    there, only the counts can tell. A constant count, or a series beside the requests, cannot: then the error in the
    note is large, or the shift is one of many.
    """
    first, last = float(times.entered_s.min()), float(times.last_token_s.max())
    low, high = first - float(series.at_s[-1]), last - float(series.at_s[0])
    ways = [np.linspace(low, high, min(_MOST_SHIFTS, int((high - low) / _COARSE_S) + 2))]
    if wall_s is not None and series.began_s is not None:
        # neither date has a year: from the last day of one to the first of the next it is one day
        start = (series.began_s - wall_s[1] + YEAR_S / 2) % YEAR_S - YEAR_S / 2
        end = start + wall_s[1] - wall_s[0]
        here = np.linspace(start, end, int((end - start) / _COARSE_S) + 2)
        zoned = [np.add.outer(_ZONE_S * np.arange(-zones, zones + 1), here).ravel() for zones in (0, _ZONES)]
        ways = [way[(low <= way) & (way <= high)] for way in (*zoned, *ways)]
        if not len(ways[1]):
            said = "Warning: the server printed its state at another time than that of these requests, in every time "
            return None, [f"{said}zone; its states are left out (is its log of another run?)."]

    def off(shift: float) -> float:
        """By how much the running counts differ in the mean."""
        begin, end = np.searchsorted(series.at_s, (first - shift, last - shift + _FINE_S))
        logged = series.running[begin:end]  # beside these requests nothing runs for them
        more = np.abs(times.under_way(series.at_s[begin:end] + shift)[0] - logged).sum() - logged.sum()
        return float(more + series.running.sum()) / len(series)

    for way in filter(len, ways):
        fine = np.linspace(-2 * _COARSE_S, 2 * _COARSE_S, int(4 * _COARSE_S / _FINE_S) + 1)
        fine += min(way, key=off)
        errors = np.array([off(shift) for shift in fine])
        shift = float(np.median(fine[errors == errors.min()]))  # the middle of where they are alike
        placed = replace(series, at_s=series.at_s + shift)
        during = placed.kept((first <= placed.at_s) & (placed.at_s <= last))
        differ = np.abs(times.under_way(during.at_s)[0] - during.running)
        if differ.sum() <= _ALIKE * during.running.sum():
            break
    others = int(_beside(placed, times).sum())
    shifted = (
        f"series: shifted by {shift:+.2f} s, where the running requests counted from the times of the requests differ "
        "least from the logged ones, by {:.2f} in the mean."
    )
    if way is ways[-1] or not others:
        return placed, [shifted.format(off(shift))]
    note = f"series: {others} states of other requests are left out, by the wall clocks of server and client."
    return (during, [shifted.format(differ.mean()), note]) if len(during) else (None, [note])


def _beside(series: Timeseries, times: LoggedRequests) -> BoolArray:
    """Which states of a server can be of no request of these."""
    first_s, last_s = times.entered_s.min() - _BESIDE_S, times.last_token_s.max() + _BESIDE_S
    return np.array((series.running > 0) & ((series.at_s < first_s) | (series.at_s > last_s)))


_ENGINES = ("sglang", "vllm")  # as clients name what they call


def _merged_settings(found: _Found, log: RequestLog) -> EngineSettings:
    """The settings of all files. What an engine printed or found out wins over what it was told.

    Raises:
        TraceError: two files contradict each other.
    """
    merged = EngineSettings()
    for path, settings in found.settings:
        known, said = merged.given(), settings.given()
        for name in known.keys() & said.keys():
            if known[name] != said[name] and name not in ("model", "version"):
                reason = f"{said[name]}, but {merged.origin.get(name, 'another file')} says {known[name]}"
                raise TraceError(str(path), None, name, reason)
        merged = merged.filled(settings)
    if merged.model is None and "model_id" in log.facts:
        merged = merged.changed(log.file.name, model=str(log.facts["model_id"]))
    backend = str(log.facts.get("backend", "")).lower()
    if merged.engine == "unknown" and (engine := next((one for one in _ENGINES if one in backend), None)):
        merged = merged.changed(log.file.name, engine=engine)
    return with_sglang_defaults(with_vllm_defaults(merged))


def _assumptions(times: LoggedRequests) -> list[str]:
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


def _doubtful(
    log: RequestLog,
    times: LoggedRequests,
    series: Timeseries | None,
    sharing: Sequence[str],
    before: IntArray,
) -> Iterator[str]:
    """What makes every simulation of a log wrong, said before any figure."""
    back = np.flatnonzero(np.diff([row.arrival_s for row in log.rows]) < -_SET_BACK_S)
    if log.in_order and 0 < len(back) <= _RARELY * len(log.rows):
        first = f"Warning: times of sending go back {len(back)} times, first after request {back[0] + 1:,}: a clock "
        yield f"{first}was set back, or the file has several runs, which are simulated as one."
    several = times.output_tokens > 1
    whole = int((several & (times.last_token_s <= times.first_token_s)).sum())
    if whole > 0.5 * several.sum():
        first = f"Warning: {whole:,} of {several.sum():,} answers came whole (not streamed): "
        yield f"{first}what the log has as their time to first token is that of the answer, which is not predicted."
    if series is not None:
        others, busy = int(_beside(series, times).sum()), int((series.running > 0).sum())
        if others > max(1.0, _RARELY * busy):
            first = (
                f"Warning: {others} of {busy} states in which the server had work lie beside these requests: "
            )
            yield f"{first}it served others too, whose states these may be (KV use, inferred ceilings, hits)."
    if not any(UNSAID in note for note in sharing):
        return
    turns = np.flatnonzero(before >= 0)
    said = (times.prompt_tokens + times.output_tokens)[before[turns]]
    if len(turns) and (times.prompt_tokens[turns] >= said).mean() > _GROWS:
        first = "Warning: the prompt of each turn is as long as all that its conversation has said; the engine may "
        yield f"{first}have had it in its prefix cache, which the log does not say, and all is computed here."
    if series is not None and series.hits is not None:
        during = series.hits[(series.at_s >= 0) & (series.at_s <= times.last_token_s.max())]
        if len(during) and during[-1] > _HITS:
            first = f"Warning: the server printed that {during[-1]:.0%} of the prompt tokens were in its prefix cache; "
            yield f"{first}the log does not say which, and all are computed here (cached_tokens or hash_ids say it)."
