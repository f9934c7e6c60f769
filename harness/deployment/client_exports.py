"""Exports of load generators: GuideLLM's benchmark file, AIPerf's records, and a plain CSV.

GuideLLM 0.8.1: JSON with `benchmarks[i].requests.successful`; the times are in `info.timings`, in 0.3 and before in the
request itself (`start_time`, `first_token_time`, `last_token_time`). AIPerf 0.13.0: `profile_export.jsonl`, one record
of `metadata` and `metrics` a line. Both have wall-clock times of the client.
"""

from typing import Any

from harness.deployment.documents import JsonDocument
from harness.deployment.documents import Path as Place
from harness.deployment.rows import (
    LoggedRequest,
    RequestLog,
    as_number,
    csv_rows,
    json_lines,
    located,
    maybe_number,
    maybe_whole,
    number,
    text_number,
    whole,
)
from traces.errors import RowError
from traces.formats.files import SourceFile
from traces.formats.parsing import MAX_INTEGER, kind, plain_integer, split_fields

PLAIN_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")
_PLAIN_MORE = ("request_id", "queued_s", "scheduled_s", "cached_tokens")


def read_guidellm(file: SourceFile) -> RequestLog:
    """The successful requests of every benchmark of the file, which ran one after another. Raises TraceError."""
    document = JsonDocument(file)
    log = RequestLog("GuideLLM", file)
    benchmarks = document.items(("benchmarks",))
    for place in range(len(benchmarks)):
        path: Place = ("benchmarks", place, "requests")
        groups = document.at(path)
        if not isinstance(groups, dict):
            raise document.error(path, RowError(None, f"object expected, found {kind(groups)}"))
        for name in ("errored", "incomplete"):
            if groups.get(name) is not None:
                for _ in document.items((*path, name)):
                    log.drop(name)
        requests = document.items((*path, "successful"))
        _check_whole(document, ("benchmarks", place), len(requests))
        for index, request in enumerate(requests):
            where = (*path, "successful", index)
            try:
                row = _guidellm_row(request)
            except RowError as error:
                raise document.error(where, error) from error
            log.drop(row) if isinstance(row, str) else log.rows.append(row)
    if len(benchmarks) > 1:
        log.notes.append(f"{file.name}: {len(benchmarks)} benchmarks, read as one run after another.")
    return log


def _check_whole(document: JsonDocument, path: Place, count: int) -> None:
    """Raise TraceError if the file keeps a sample of the requests only: the others loaded the server as well."""
    totals = document.at(path).get("metrics") or {}
    totals = (totals.get("request_totals") or {}) if isinstance(totals, dict) else {}
    total = totals.get("successful") if isinstance(totals, dict) else None
    if isinstance(total, int) and total > count:
        reason = f"a sample of {count} of {total} successful requests; write the file without a sample size"
        raise document.error((*path, "requests", "successful"), RowError(None, reason))


def _guidellm_row(request: Any) -> LoggedRequest | str:
    if not isinstance(request, dict):
        raise RowError(None, f"object expected, found {kind(request)}")
    info = request.get("info")
    timings = info.get("timings") if isinstance(info, dict) else None
    if isinstance(timings, dict):
        names = ("request_start", "first_token_iteration", "last_token_iteration")
        times = {name: maybe_number(timings, name) for name in names}
    else:
        names = ("start_time", "first_token_time", "last_token_time")
        times = {name: maybe_number(request, name) for name in names}
    missing = [name for name, value in times.items() if value is None]
    if missing:
        return f"no time {missing[0]}"
    arrival, first, last = (value for value in times.values() if value is not None)
    output = whole(request, "output_tokens")
    if not output:
        return "no output token"
    cached = maybe_whole(request, "cached_tokens")
    prompt = whole(request, "prompt_tokens", 1)
    name = str(request.get("request_id", ""))
    return LoggedRequest(name, arrival, first, last, prompt, output, cached_tokens=cached)


def read_aiperf(file: SourceFile) -> RequestLog:
    """The finished requests of AIPerf's records, with token counts of the server if it gave them. Raises TraceError."""
    log = RequestLog("AIPerf", file)
    counted = 0
    for line, record in json_lines(file):
        try:
            row = _aiperf_row(record, line)
        except RowError as error:
            raise located(file, line, error) from error
        log.drop(row) if isinstance(row, str) else log.rows.append(row)
        counted += "usage_completion_tokens" not in (record.get("metrics") or {})
    if counted and log.rows:
        log.notes.append(
            f"{file.name}: {counted:,} records have no token counts of the server; the client's own count is taken. "
            "AIPerf asks for them with --use-server-token-count."
        )
    return log


def _aiperf_row(record: dict[str, Any], line: int) -> LoggedRequest | str:
    facts, metrics = record.get("metadata"), record.get("metrics")
    if not isinstance(facts, dict) or not isinstance(metrics, dict):
        wrong = "metrics" if isinstance(facts, dict) else "metadata"
        raise RowError(wrong, f"object expected, found {kind(record.get(wrong))}")
    if record.get("error") is not None:
        return "failed"
    if facts.get("was_cancelled"):
        return "cancelled"
    if "time_to_first_token" not in metrics:
        return "no time to first token (AIPerf measures it with --streaming)"
    start = number(facts, "request_start_ns") / 1e9
    first = start + _metric(metrics, "time_to_first_token", "ms") / 1e3
    last = start + _metric(metrics, "request_latency", "ms") / 1e3
    output = _tokens(metrics, "usage_completion_tokens", "output_sequence_length")
    if not output:
        return "no output token"
    prompt = _tokens(metrics, "usage_prompt_tokens", "input_sequence_length")
    cached = None
    if "usage_prompt_cache_read_tokens" in metrics:
        cached = int(_metric(metrics, "usage_prompt_cache_read_tokens", "tokens"))
    name = str(facts.get("x_request_id", line))
    return LoggedRequest(
        name, start, first, max(last, first), prompt, output, cached_tokens=cached, line=line
    )


def _tokens(metrics: dict[str, Any], name: str, other: str) -> int:
    chosen = name if name in metrics else other
    found = _metric(metrics, chosen, "tokens")
    if found != int(found) or not 0 <= found <= MAX_INTEGER:
        raise RowError(
            f"metrics.{chosen}.value", f"whole number up to {MAX_INTEGER} expected, found {found:g}"
        )
    return int(found)


def _metric(metrics: dict[str, Any], name: str, unit: str) -> float:
    entry = metrics.get(name)
    if not isinstance(entry, dict) or "value" not in entry:
        raise RowError(f"metrics.{name}", "missing, or no object of value and unit")
    if entry.get("unit") != unit:
        raise RowError(f"metrics.{name}.unit", f"{unit} expected, found {entry.get('unit')}")
    return as_number(entry["value"], f"metrics.{name}.value")


def read_plain_csv(file: SourceFile) -> RequestLog:
    """A CSV of arrivals, lengths, first and last token; seconds on one clock. Raises TraceError."""
    log = RequestLog("plain CSV", file)
    header = split_fields(file.first_line)
    more = tuple(name for name in _PLAIN_MORE if name in header)
    unused = [name for name in header if name not in (*PLAIN_COLUMNS, *more)]
    if unused:
        log.notes.append(f"{file.name}: columns that are not read: {', '.join(unused)}.")
    for line, fields in csv_rows(file, (*PLAIN_COLUMNS, *more)):
        try:
            row = _plain_row(fields, line)
        except RowError as error:
            raise located(file, line, error) from error
        log.drop(row) if isinstance(row, str) else log.rows.append(row)
    return log


def _plain_row(fields: dict[str, str], line: int) -> LoggedRequest | str:
    prompt = plain_integer(fields["prompt_tokens"].strip(), "prompt_tokens", 1)
    output = plain_integer(fields["output_tokens"].strip(), "output_tokens", 0)
    arrival = text_number(fields, "arrival_s")
    if not output or not fields["first_token_s"].strip():
        return "no output token"
    times = {name: text_number(fields, name) for name in ("queued_s", "scheduled_s") if name in fields}
    cached = (
        plain_integer(fields["cached_tokens"].strip(), "cached_tokens", 0)
        if "cached_tokens" in fields
        else None
    )
    return LoggedRequest(
        fields.get("request_id", str(line - 2)),
        arrival,
        text_number(fields, "first_token_s"),
        text_number(fields, "last_token_s"),
        prompt,
        output,
        times.get("queued_s"),
        times.get("scheduled_s"),
        cached,
        line=line,
    )
