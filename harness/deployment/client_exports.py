"""Exports of load generators: GuideLLM's benchmark file, AIPerf's records, and a plain log (CSV or JSON lines).

GuideLLM 0.8.1: JSON with `benchmarks[i].requests.successful`; the times are in `info.timings`, in 0.3 and before in the
request itself (`start_time`, `first_token_time`, `last_token_time`). AIPerf 0.13.0: `profile_export.jsonl`, one record
of `metadata` and `metrics` a line. Both have wall-clock times of the client.
"""

from collections.abc import Iterator
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
PLAIN_MORE = (
    *("request_id", "queued_s", "scheduled_s", "cached_tokens"),
    *("hash_ids", "hash_block_tokens", "prefix", "prefix_tokens"),
)
_SECONDS = ("arrival_s", "first_token_s", "last_token_s", "queued_s", "scheduled_s")


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


def read_plain(file: SourceFile) -> RequestLog:
    """A CSV of arrivals, lengths, first and last token, or JSON lines with the same names; seconds on one clock.

    `hash_ids` are ids of the prompt's blocks: a list, in CSV separated by spaces. Raises TraceError.
    """
    log = RequestLog("plain log", file)
    is_json = file.first_line.lstrip().startswith("{")
    unused: dict[str, None] = {}
    for line, fields in _plain_objects(file, unused) if is_json else _plain_fields(file, unused):
        try:
            row = _plain_row(fields, line, line if is_json else line - 1)
            if "hash_block_tokens" in fields:
                _note_block(log, plain_integer(fields["hash_block_tokens"], "hash_block_tokens", 1))
        except RowError as error:
            raise located(file, line, error) from error
        log.drop(row) if isinstance(row, str) else log.rows.append(row)
    if unused:
        log.notes.append(f"{file.name}: columns that are not read: {', '.join(unused)}.")
    return log


def _plain_fields(file: SourceFile, unused: dict[str, None]) -> Iterator[tuple[int, dict[str, str]]]:
    header = split_fields(file.first_line)
    more = tuple(name for name in PLAIN_MORE if name in header)
    unused |= dict.fromkeys(name for name in header if name not in (*PLAIN_COLUMNS, *more))
    for line, fields in csv_rows(file, (*PLAIN_COLUMNS, *more)):
        yield (
            line,
            {name: text.strip() for name, text in fields.items() if name in PLAIN_COLUMNS or text.strip()},
        )


def _plain_objects(file: SourceFile, unused: dict[str, None]) -> Iterator[tuple[int, dict[str, str]]]:
    for line, record in json_lines(file):
        unused |= dict.fromkeys(name for name in record if name not in (*PLAIN_COLUMNS, *PLAIN_MORE))
        try:
            found = {
                name: _plain_text(record[name], name)
                for name in (*PLAIN_COLUMNS, *PLAIN_MORE)
                if record.get(name) is not None
            }
            for name in PLAIN_COLUMNS[:3]:
                number(record, name)
        except RowError as error:
            raise located(file, line, error) from error
        yield line, {**dict.fromkeys(PLAIN_COLUMNS, ""), **found}


def _plain_text(value: Any, name: str) -> str:
    """A JSON value as the text that a CSV would have. Raises RowError."""
    if name == "hash_ids":
        if not isinstance(value, list) or not all(type(one) in (int, str) for one in value):
            raise RowError(name, f"list of numbers or strings expected, found {kind(value)}")
        return " ".join(map(str, value))
    if name in ("request_id", "prefix") and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    found = as_number(value, name)
    return str(int(found)) if found == int(found) and name not in _SECONDS else repr(found)


def _note_block(log: RequestLog, tokens: int) -> None:
    if log.block_tokens not in (None, tokens):
        raise RowError("hash_block_tokens", f"{tokens}, but {log.block_tokens} before; one size in a log")
    log.block_tokens = tokens


def _plain_row(fields: dict[str, str], line: int, number_of_row: int) -> LoggedRequest | str:
    prompt = plain_integer(fields["prompt_tokens"], "prompt_tokens", 1)
    output = plain_integer(fields["output_tokens"], "output_tokens", 0)
    arrival = text_number(fields, "arrival_s")
    if not output or not fields["first_token_s"]:
        return "no output token"
    times = {name: text_number(fields, name) for name in ("queued_s", "scheduled_s") if name in fields}
    cached = plain_integer(fields["cached_tokens"], "cached_tokens", 0) if "cached_tokens" in fields else None
    if cached is not None and cached > prompt:
        raise RowError("cached_tokens", f"{cached} is more than prompt_tokens {prompt}")
    ids = tuple(fields["hash_ids"].strip("[]").replace(",", " ").split()) if "hash_ids" in fields else None
    return LoggedRequest(
        fields.get("request_id", str(number_of_row - 1)),
        arrival,
        text_number(fields, "first_token_s"),
        text_number(fields, "last_token_s"),
        prompt,
        output,
        times.get("queued_s"),
        times.get("scheduled_s"),
        cached,
        hash_ids=ids,
        **_prefix(fields, prompt),
        line=line,
    )


def _prefix(fields: dict[str, str], prompt: int) -> dict[str, Any]:
    """The named beginning of a prompt. Raises RowError."""
    if ("prefix" in fields) != ("prefix_tokens" in fields):
        absent = "prefix_tokens" if "prefix" in fields else "prefix"
        raise RowError(absent, "is empty; prefix and prefix_tokens go together")
    if "prefix" not in fields:
        return {}
    tokens = plain_integer(fields["prefix_tokens"], "prefix_tokens", 1)
    if tokens > prompt:
        raise RowError("prefix_tokens", f"{tokens} is more than prompt_tokens {prompt}")
    return {"prefix": fields["prefix"], "prefix_tokens": tokens}
