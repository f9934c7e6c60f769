"""Logs of requests as files: of load generators, of tracing, of a recorder, and a plain CSV or JSON lines.

`vllm bench serve --save-result --save-detailed` (`vllm/benchmarks/serve.py` of vLLM 0.19.0): lists with one entry for
each request, `input_lens`, `output_lens`, `ttfts`, `itls` (gaps between chunks), `start_times`, `errors`; times are
seconds of the client's monotonic clock.

GuideLLM 0.8.1: JSON with `benchmarks[i].requests.successful`; the times are in `info.timings`, in 0.3 and before in the
request itself (`start_time`, `first_token_time`, `last_token_time`). AIPerf 0.13.0: `profile_export.jsonl`, one record
of `metadata` and `metrics` a line. Both have wall-clock times of the client.

inference-engine-benchmark-system (`benchmarks/runner.py` of github.com/varad-more/inference-engine-benchmark-system):
`requests` of a closed loop in their order, `ttft_ms`, `total_ms`, `output_tokens`, `prompt_len` in words, and a
`prompt_id` that names the text; levels of concurrency run one after another, each behind a semaphore.

LLMServingSim's vLLM recorder (`bench/core/recorder.py` of github.com/casys-kaist/LLMServingSim at 5daddb2): a request
has `input_toks`, `output_toks`, `arrival_time` (wall clock) and `queued_ts`, `scheduled_ts`, `first_token_ts`,
`last_token_ts` (the engine's monotonic clock), all in seconds.

OpenTelemetry spans with the attributes `gen_ai.*` of vLLM and SGLang, in two forms: OTLP JSON, one object a line, as
the collector's file exporter writes it (`resourceSpans`), and the export of Jaeger's page (`data`). Source of the
attributes: `vllm/v1/engine/output_processor.py` (do_tracing) and `vllm/tracing/utils.py` of vLLM 0.19.0;
`sglang/srt/observability/req_time_stats.py` of SGLang 0.5.23. A span starts at the arrival. Its attributes are
durations in seconds, so that queue, schedule and tokens follow: first token = arrival + time_to_first_token, scheduled
= first token - time_in_model_prefill, queued = scheduled - time_in_queue, last token = first token +
time_in_model_decode (without it: arrival + e2e).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

from harness.twin import rows
from traces.errors import RowError, TraceError
from traces.formats import parsing
from traces.formats.files import SourceFile
from traces.formats.parsing import in_range, kind, plain_integer, split_fields

# -- vllm bench serve -------------------------------------------------------------------------------------------------

BENCH_KEYS = ("input_lens", "output_lens", "ttfts", "itls")
_FACTS = ("model_id", "backend", "request_rate", "max_concurrency", "date")


def read_bench_result(file: SourceFile) -> rows.RequestLog:
    """The requests. A request with an error or without a token is dropped. Raises TraceError."""
    document = rows.JsonDocument(file)
    log = rows.RequestLog("vllm bench serve", file, in_order=True)
    log.facts = {name: document.value[name] for name in _FACTS if document.value.get(name) is not None}
    columns = {name: document.items((name,)) for name in BENCH_KEYS}
    starts = "start_times" in document.value
    if starts:
        columns["start_times"] = document.items(("start_times",))
    errors = document.items(("errors",)) if document.value.get("errors") else [""] * len(columns["ttfts"])
    for name, column in (*columns.items(), ("errors", errors)):
        with document.placed((name,)):
            if len(column) != len(columns["input_lens"]):
                reason = f"{len(column)} entries, but input_lens has {len(columns['input_lens'])}"
                raise RowError(None, reason)
    if not starts:
        columns["start_times"] = _starts_of_a_closed_loop(document, columns, any(errors))
        log.notes.append(
            f"{file.name}: no start_times (vLLM before 0.19); each request is taken to start when an answer makes room."
        )
    for index, error in enumerate(errors):
        log.add("failed" if error else _bench_row(document, columns, index))
    return log


def _starts_of_a_closed_loop(
    document: rows.JsonDocument, columns: dict[str, list[Any]], failed: bool
) -> list[float]:
    """When the requests of a client without a schedule of its own started, from how long each took.

    `vllm bench serve` sends them in their order, each when a place of its semaphore is free.
    """
    most, rate = document.value.get("max_concurrency"), document.value.get("request_rate")
    with document.placed(()):
        if str(rate) not in ("inf", "Infinity") or not isinstance(most, int) or most < 1 or failed:
            raise RowError(
                "start_times",
                "missing, so that the arrivals are not known; vLLM 0.10 does not write it, 0.19 does. Without it, "
                "only a closed loop can be read (request_rate inf, a max_concurrency, and no failed request)",
            )
    free = [0.0] * most
    starts = []
    for place in range(len(columns["ttfts"])):
        starts.append(heappop(free))
        took = _seconds(document, "ttfts", place) + _gaps(document, place)
        heappush(free, starts[-1] + took)
    return starts


def _seconds(document: rows.JsonDocument, name: str, place: int) -> float:
    with document.placed((name, place)):
        return parsing.as_number(document.at((name, place)), None, 0)


def _gaps(document: rows.JsonDocument, index: int) -> float:
    """The sum of the gaps between the chunks of a request."""
    total = 0.0
    for place, gap in enumerate(document.items(("itls", index))):
        with document.placed(("itls", index, place)):
            total += parsing.as_number(gap, None, 0)
    return total


def _bench_row(
    document: rows.JsonDocument, columns: dict[str, list[Any]], index: int
) -> rows.LoggedRequest | str:
    lengths = []
    for name, lowest in (("input_lens", 1), ("output_lens", 0)):
        with document.placed((name, index)):
            lengths.append(parsing.as_whole(columns[name][index], None, lowest))
    with document.placed(("start_times", index)):
        start = parsing.as_number(columns["start_times"][index], None)
    ttft, total = _seconds(document, "ttfts", index), _gaps(document, index)
    prompt, output = lengths
    if not output or not ttft:
        return "no output token"
    return rows.LoggedRequest(str(index), start, start + ttft, start + ttft + total, prompt, output)


# -- inference-engine-benchmark-system --------------------------------------------------------------------------------

LEVEL_KEYS = ("scenario_name", "engine_name", "requests")
_TOKENS_OF_A_WORD = 4 / 3
# Between an answer and the next request the client has the server count the prompt's tokens. The walls of the levels of
# one request at a time say 4 to 5 ms on vLLM, 2 to 3 ms on SGLang.
_COUNTING_S = 0.004


def read_levels(file: SourceFile) -> rows.RequestLog:
    """The requests of all levels; each place of a level's semaphore is a session. Raises TraceError.

    A request starts when one before it makes room. `asyncio.as_completed` started them in an order of its own, which
    the file does not keep: the distribution over requests of a level is known, not which of them ran together.
    """
    document = rows.JsonDocument(file)
    log = rows.RequestLog("inference-engine-benchmark-system", file, assumes_pauses=True)
    scenario = document.object(("scenario_config",))
    requests = document.items(("requests",))
    with document.placed(("scenario_config",)):
        levels = scenario.get("concurrency_levels") or [parsing.whole(scenario, "concurrency", 1)]
        each = scenario.get("requests_per_level") or parsing.whole(scenario, "num_requests", 1)
        known = all(isinstance(level, int) and level > 0 for level in levels)
        if not known or each * len(levels) != len(requests):
            raise RowError(None, f"{len(levels)} levels of {each} requests, but the file has {len(requests)}")
    start = ended = 0.0
    for level, most in enumerate(levels):
        free, start = [(ended, place) for place in range(most)], ended
        for place in range(level * each, (level + 1) * each):
            with document.placed(("requests", place)):
                row = document.object(("requests", place))
                start, slot = heappop(free)
                last = start + parsing.number(row, "total_ms") / 1e3
                heappush(free, (last + _COUNTING_S, slot))
                ended = max(ended, last)
                log.add(_level_row(row, place, start, last, f"level {level + 1}, place {slot + 1}"))
    facts = document.value.get("run_metadata")
    log.facts = {"model_id": facts["model"]} if isinstance(facts, dict) and "model" in facts else {}
    log.facts["backend"] = str(document.value.get("engine_name", ""))
    log.notes.append(
        f"{file.name}: prompt_len counts words; a word is taken as 4/3 tokens. Its KV use and running requests are not "
        "read: the recorder wrote 0 throughout."
    )
    return log


def _level_row(
    row: dict[str, Any], place: int, start: float, last: float, session: str
) -> rows.LoggedRequest | str:
    if row.get("success") is not True:
        return "failed"
    output = parsing.whole(row, "output_tokens")
    if not output:
        return "no output token"
    first = start + parsing.number(row, "ttft_ms") / 1e3
    prompt = max(1, round(_TOKENS_OF_A_WORD * parsing.whole(row, "prompt_len")))
    known = row.get("prompt_id")  # requests of one id have one prompt
    more: dict[str, Any] = {"prefix": str(known), "prefix_tokens": prompt} if known else {}
    return rows.LoggedRequest(str(place), start, first, last, prompt, output, **more, session=session)


# -- GuideLLM ---------------------------------------------------------------------------------------------------------


def read_guidellm(file: SourceFile) -> rows.RequestLog:
    """The successful requests of every benchmark of the file, which ran one after another. Raises TraceError."""
    document = rows.JsonDocument(file)
    log = rows.RequestLog("GuideLLM", file)
    benchmarks = document.items(("benchmarks",))
    for place in range(len(benchmarks)):
        path: rows.Path = ("benchmarks", place, "requests")
        groups = document.object(path)
        for name in ("errored", "incomplete"):
            if groups.get(name) is not None:
                for _ in document.items((*path, name)):
                    log.add(name)
        requests = document.items((*path, "successful"))
        _check_whole(document, ("benchmarks", place), len(requests))
        if len(benchmarks) == 1:
            log.facts |= _guidellm_client(benchmarks[0])
        for index, request in enumerate(requests):
            with document.placed((*path, "successful", index)):
                log.add(_guidellm_row(request))
    if len(benchmarks) > 1:
        log.notes.append(f"{file.name}: {len(benchmarks)} benchmarks, read as one run after another.")
    return log


def _guidellm_client(benchmark: Any) -> dict[str, Any]:
    """The most requests in flight that the strategy of a benchmark allows, if it limits them."""
    config = benchmark.get("config") if isinstance(benchmark, dict) else None
    strategy = config.get("strategy") if isinstance(config, dict) else None
    if not isinstance(strategy, dict) or strategy.get("type_") not in ("synchronous", "concurrent"):
        return {}
    most = strategy.get("max_concurrency", strategy.get("streams"))
    most = 1 if strategy["type_"] == "synchronous" else most
    return {} if most is None else {"max_concurrency": most, "request_rate": "inf"}


def _check_whole(document: rows.JsonDocument, path: rows.Path, count: int) -> None:
    """Raise TraceError if the file keeps a sample of the requests only: the others loaded the server as well."""
    total = document.at(path)
    for name in ("metrics", "request_totals", "successful"):
        total = total.get(name) if isinstance(total, dict) else None
    with document.placed((*path, "requests", "successful")):
        if isinstance(total, int) and total > count:
            reason = f"a sample of {count} of {total} successful requests; write all of them"
            raise RowError(None, reason)


def _guidellm_row(request: Any) -> rows.LoggedRequest | str:
    if not isinstance(request, dict):
        raise RowError(None, f"object expected, found {kind(request)}")
    info = request.get("info")
    times, names = request, ("start_time", "first_token_time", "last_token_time")
    if isinstance(info, dict) and isinstance(info.get("timings"), dict):
        times, names = info["timings"], ("request_start", "first_token_iteration", "last_token_iteration")
    found = [parsing.maybe_number(times, name) for name in names]
    arrival, first, last = found
    if arrival is None or first is None or last is None:
        return f"no time {names[found.index(None)]}"
    output = parsing.whole(request, "output_tokens")
    cached = parsing.maybe_whole(request, "cached_tokens")
    prompt = parsing.whole(request, "prompt_tokens", 1)
    name = str(request.get("request_id", ""))
    return rows.LoggedRequest(name, arrival, first, last, prompt, output, cached_tokens=cached)


# -- AIPerf -----------------------------------------------------------------------------------------------------------


def read_aiperf(file: SourceFile) -> rows.RequestLog:
    """The finished requests of AIPerf's records, with token counts of the server if it gave them. Raises TraceError."""
    log = rows.RequestLog("AIPerf", file)
    counted = 0

    def row(record: dict[str, Any], line: int | None) -> rows.LoggedRequest | str:
        nonlocal counted
        found = _aiperf_row(record, line)
        counted += "usage_completion_tokens" not in record["metrics"]
        return found

    log.add_each(rows.json_lines(file), row)
    if counted and log.rows:
        log.notes.append(
            f"{file.name}: {counted:,} records have no token counts of the server; the client's own count is taken. "
            "AIPerf asks for them with --use-server-token-count."
        )
    return log


def _aiperf_row(record: dict[str, Any], line: int | None) -> rows.LoggedRequest | str:
    for wanted in ("metadata", "metrics"):
        if not isinstance(record.get(wanted), dict):
            raise RowError(wanted, f"object expected, found {kind(record.get(wanted))}")
    facts, metrics = record["metadata"], record["metrics"]
    if record.get("error") is not None:
        return "failed"
    if facts.get("was_cancelled"):
        return "cancelled"
    if "time_to_first_token" not in metrics:
        return "no time to first token (AIPerf measures it with --streaming)"
    start = parsing.number(facts, "request_start_ns") / 1e9
    first = start + _milliseconds(metrics, "time_to_first_token")
    last = start + _milliseconds(metrics, "request_latency")
    output = _tokens(metrics, "usage_completion_tokens", "output_sequence_length")
    prompt = _tokens(metrics, "usage_prompt_tokens", "input_sequence_length")
    read = "usage_prompt_cache_read_tokens"
    cached = _tokens(metrics, read, read) if read in metrics else None
    name = str(facts.get("x_request_id", line))
    last = rows.not_before(last, first)
    known = facts.get("x_correlation_id", facts.get("conversation_id"))
    more: dict[str, Any] = {"cached_tokens": cached, "session": None if known is None else str(known)}
    return rows.LoggedRequest(name, start, first, last, prompt, output, **more, line=line)


def _tokens(metrics: dict[str, Any], name: str, other: str) -> int:
    chosen = name if name in metrics else other
    return parsing.as_whole(_metric(metrics, chosen, "tokens"), f"metrics.{chosen}.value")


def _metric(metrics: dict[str, Any], name: str, unit: str) -> Any:
    """The value of a metric, which must have this unit. Raises RowError."""
    entry = metrics.get(name)
    if not isinstance(entry, dict) or "value" not in entry:
        raise RowError(f"metrics.{name}", "missing, or no object of value and unit")
    if entry.get("unit") != unit:
        raise RowError(f"metrics.{name}.unit", f"{unit} expected, found {entry.get('unit')}")
    return entry["value"]


def _milliseconds(metrics: dict[str, Any], name: str) -> float:
    """A duration in seconds. Raises RowError."""
    return parsing.as_number(_metric(metrics, name, "ms"), f"metrics.{name}.value", 0) / 1e3


# -- LLMServingSim's recorder -----------------------------------------------------------------------------------------

_CLOCK = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def read_recorded_requests(file: SourceFile) -> rows.RequestLog:
    """The requests, all on the engine's clock. Raises TraceError.

    The wall clock is shifted by the least `queued_ts - arrival_time` of all requests: one request at least is taken to
    have entered the queue at once. So a mean delay between arrival and queue is known only beyond that least delay.
    """
    log = rows.RequestLog("vLLM recorder", file)
    log.add_each(rows.json_lines(file), _recorded_row)
    if not log.rows:
        return log
    # queued_s is set in every row
    offset = min((row.queued_s or 0.0) - row.arrival_s for row in log.rows)
    delay = 0.0
    for place, row in enumerate(log.rows):
        queued = row.queued_s or 0.0
        arrival = min(row.arrival_s + offset, queued)  # a wall clock is exact to 0.2 us
        log.rows[place] = replace(row, arrival_s=arrival)
        delay += (queued - arrival) / len(log.rows)
    log.notes.append(
        f"{file.name}: arrival_time is a wall clock, the other times are the engine's. It is shifted by the least "
        f"difference, {offset:.6f} s; then queued_ts is {1000 * delay:.1f} ms after the arrival in the mean."
    )
    return log


def _recorded_row(record: dict[str, Any], line: int | None) -> rows.LoggedRequest | str:
    missing = next((name for name in _CLOCK if record.get(name) is None), None)
    if missing is not None:
        return f"no time of {missing}"
    arrival, queued, scheduled, first, last = (
        parsing.number(record, name) for name in ("arrival_time", *_CLOCK)
    )
    name = record.get("request_id")
    if not isinstance(name, str | int):
        raise RowError("request_id", f"string expected, found {kind(name)}")
    prompt, output = parsing.whole(record, "input_toks", 1), parsing.whole(record, "output_toks")
    return rows.LoggedRequest(str(name), arrival, first, last, prompt, output, queued, scheduled, line=line)


# -- OpenTelemetry spans ----------------------------------------------------------------------------------------------

TTFT, E2E = "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"
QUEUE = "gen_ai.latency.time_in_queue"
PREFILL, DECODE = "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode"
PROMPT, OUTPUT = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"
_START = "start of the span"
Span = tuple[str, dict[str, Any]]  # its name, and its attributes with the start in seconds


def read_spans(file: SourceFile) -> rows.RequestLog:
    """The requests of all spans that have a time to first token. Raises TraceError."""
    log = rows.RequestLog("OpenTelemetry spans", file)
    found = list(_spans(file))
    of_requests = [(line, span) for line, span in found if OUTPUT in span[1] or TTFT in span[1]]
    log.add_each(of_requests, _span_row)
    if others := len(found) - len(of_requests):
        log.notes.append(f"{file.name}: {others:,} spans are not of requests and were left out.")
    return log


def _span_row(span: Span, line: int | None) -> rows.LoggedRequest | str:
    name, attributes = span
    output = parsing.maybe_whole(attributes, OUTPUT)
    if attributes.get(TTFT) is None or not output:
        return "no time to first token"
    arrival = parsing.number(attributes, _START)
    first = arrival + parsing.number(attributes, TTFT, 0)
    prefill, queue, decode, whole = (
        parsing.maybe_number(attributes, key, 0, rows.LATEST_S) for key in (PREFILL, QUEUE, DECODE, E2E)
    )
    if decode is None and whole is None:
        raise RowError(E2E, f"missing, as is {DECODE}")
    last = first + decode if decode is not None else arrival + (whole or 0.0)
    queued = scheduled = None
    if prefill is not None and queue is not None:
        scheduled = first - prefill
        queued = rows.not_before(scheduled - queue, arrival)
    prompt = parsing.whole(attributes, PROMPT, 1)
    name = str(attributes.get("gen_ai.request.id", name))
    last = rows.not_before(last, first)
    return rows.LoggedRequest(name, arrival, first, last, prompt, output, queued, scheduled, line=line)


def _spans(file: SourceFile) -> Iterator[tuple[int | None, Span]]:
    if '"resourceSpans"' in file.first_line:
        for line, record in rows.json_lines(file):
            yield from _otlp(file, line, record)
        return
    document = rows.JsonDocument(file)
    if "resourceSpans" in document.value:
        yield from _otlp(file, None, document.value)
        return
    for place in range(len(document.items(("data",)))):
        path = ("data", place, "spans")
        for index, span in enumerate(document.items(path)):
            with document.placed((*path, index)):
                found = _jaeger(span)
            yield None, found


def _otlp(file: SourceFile, line: int | None, record: dict[str, Any]) -> Iterator[tuple[int | None, Span]]:
    try:
        for place, resource in enumerate(record["resourceSpans"]):
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    with rows.placed(file, line):
                        found = _otlp_attributes(span)
                    yield line, (str(span.get("spanId", place)), found)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"not in the form of OTLP: {error} is missing or of another kind"
        raise TraceError(file.path, line, "resourceSpans", reason) from error


def _otlp_attributes(span: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in span.get("attributes", ()):
        value = attribute["value"]
        names = ("intValue", "doubleValue", "stringValue")
        text = next((value[name] for name in names if name in value), None)
        found[attribute["key"]] = _plain(text) if "stringValue" not in value else text
    found[_START] = _whole_number(span, "startTimeUnixNano") / 1e9
    return _named_alike(found)


def _jaeger(span: Any) -> Span:
    if not isinstance(span, dict) or not isinstance(span.get("tags"), list):
        raise RowError("tags", f"list expected, found {kind(span)}")
    found = {tag["key"]: tag.get("value") for tag in span["tags"] if isinstance(tag, dict) and "key" in tag}
    found[_START] = _whole_number(span, "startTime") / 1e6
    return str(span.get("spanID", "")), _named_alike(found)


def _named_alike(found: dict[str, Any]) -> dict[str, Any]:
    """The attributes under vLLM's names; newer conventions call the counts input and output tokens."""
    for name, other in ((PROMPT, "gen_ai.usage.input_tokens"), (OUTPUT, "gen_ai.usage.output_tokens")):
        if name not in found and other in found:
            found[name] = found[other]
    return found


def _whole_number(record: dict[str, Any], key: str) -> int:
    """An integer that OTLP writes as a string. Raises RowError."""
    value = _plain(record.get(key))
    if not isinstance(value, int) or isinstance(value, bool):
        raise RowError(key, f"whole number expected, found {kind(record.get(key))}")
    return in_range(value, key, 0, 2**64)


def _plain(value: Any) -> Any:
    """A whole number that is written as a string, as OTLP does for those of 64 bits; else the value as it is."""
    is_whole = isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value, re.ASCII)
    return int(value) if is_whole else value


# -- CSV and JSON lines -----------------------------------------------------------------------------------------------

PLAIN_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")
_MORE = (
    *("request_id", "queued_s", "scheduled_s", "cached_tokens"),
    *("hash_ids", "hash_block_tokens", "prefix", "prefix_tokens", "session"),
)


def read_plain(file: SourceFile) -> rows.RequestLog:
    """A CSV of arrivals, lengths, first and last token, or JSON lines with the same names; seconds on one clock.

    `hash_ids` are ids of the prompt's blocks: a list, in CSV separated by spaces. Raises TraceError.
    """
    log = rows.RequestLog("plain log", file)
    is_json = file.first_line.lstrip().startswith("{")
    unused: dict[str, None] = {}

    def row(fields: dict[str, str], line: int | None) -> rows.LoggedRequest | str:
        found = _plain_row(fields, line or 0, is_json)
        if "hash_block_tokens" in fields:
            tokens = plain_integer(fields["hash_block_tokens"], "hash_block_tokens", 1)
            if log.block_tokens not in (None, tokens):
                reason = f"{tokens}, but {log.block_tokens} before; one size in a log"
                raise RowError("hash_block_tokens", reason)
            log.block_tokens = tokens
        return found

    log.add_each((_plain_objects if is_json else _plain_fields)(file, unused), row)
    if unused:
        log.notes.append(f"{file.name}: columns that are not read: {', '.join(unused)}.")
    return log


def _plain_fields(file: SourceFile, unused: dict[str, None]) -> Iterator[tuple[int, dict[str, str]]]:
    header = split_fields(file.first_line)
    more = tuple(name for name in _MORE if name in header)
    unused |= dict.fromkeys(name for name in header if name not in (*PLAIN_COLUMNS, *more))
    for line, fields in rows.csv_rows(file, (*PLAIN_COLUMNS, *more)):
        stripped = {name: text.strip() for name, text in fields.items()}
        yield line, {name: text for name, text in stripped.items() if text or name in PLAIN_COLUMNS}


def _plain_objects(file: SourceFile, unused: dict[str, None]) -> Iterator[tuple[int, dict[str, str]]]:
    names = (*PLAIN_COLUMNS, *_MORE)
    for line, record in rows.json_lines(file):
        unused |= dict.fromkeys(name for name in record if name not in names)
        with rows.placed(file, line):
            found = {name: _as_text(record[name], name) for name in names if record.get(name) is not None}
            for name in PLAIN_COLUMNS[:3]:
                parsing.number(record, name)
        yield line, {**dict.fromkeys(PLAIN_COLUMNS, ""), **found}


def _as_text(value: Any, name: str) -> str:
    """A JSON value as the text that a CSV would have. Raises RowError."""
    if name == "hash_ids":
        if not isinstance(value, list) or not all(type(one) in (int, str) for one in value):
            raise RowError(name, f"list of numbers or strings expected, found {kind(value)}")
        return " ".join(map(str, value))
    if name in ("request_id", "prefix", "session") and type(value) in (int, str):
        return str(value)
    found = parsing.as_number(value, name)
    return str(int(found)) if found == int(found) and not name.endswith("_s") else repr(found)


def _plain_row(fields: dict[str, str], line: int, is_json: bool) -> rows.LoggedRequest | str:
    prompt = plain_integer(fields["prompt_tokens"], "prompt_tokens", 1)
    output = plain_integer(fields["output_tokens"], "output_tokens", 0)
    arrival = parsing.text_number(fields, "arrival_s")
    if not output or not fields["first_token_s"]:
        return "no output token"
    more: dict[str, Any] = {
        name: parsing.text_number(fields, name) for name in ("queued_s", "scheduled_s") if name in fields
    }
    if "cached_tokens" in fields:
        more["cached_tokens"] = plain_integer(fields["cached_tokens"], "cached_tokens", 0)
    if "hash_ids" in fields:
        more["hash_ids"] = tuple(fields["hash_ids"].strip("[]").replace(",", " ").split())
    name = fields.get("request_id", str(line - 1 if is_json else line - 2))
    first, last = parsing.text_number(fields, "first_token_s"), parsing.text_number(fields, "last_token_s")
    if ("prefix" in fields) != ("prefix_tokens" in fields):
        absent = "prefix_tokens" if "prefix" in fields else "prefix"
        raise RowError(absent, "is empty; prefix and prefix_tokens go together")
    if "prefix" in fields:
        tokens = plain_integer(fields["prefix_tokens"], "prefix_tokens", 1)
        if tokens > prompt:
            raise RowError("prefix_tokens", f"{tokens} is more than prompt_tokens {prompt}")
        more |= {"prefix": fields["prefix"], "prefix_tokens": tokens}
    session = fields.get("session")
    return rows.LoggedRequest(name, arrival, first, last, prompt, output, **more, session=session, line=line)
