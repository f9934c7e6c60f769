"""OpenTelemetry spans of requests, with the attributes `gen_ai.*` of vLLM and SGLang.

Two forms: OTLP JSON, one object a line, as the collector's file exporter writes it (`resourceSpans`), and the export of
Jaeger's page (`data`). Source of the attributes: `vllm/v1/engine/output_processor.py` (do_tracing) and
`vllm/tracing/utils.py` of vLLM 0.19.0; `sglang/srt/observability/req_time_stats.py` of SGLang 0.5.23.

A span starts at the arrival. Its attributes are durations in seconds, so that queue, schedule and tokens follow:
first token = arrival + time_to_first_token, scheduled = first token - time_in_model_prefill, queued = scheduled -
time_in_queue, last token = first token + time_in_model_decode (without it: arrival + e2e).
"""

import json
from collections.abc import Iterator
from typing import Any

from harness.deployment.documents import JsonDocument
from harness.deployment.rows import LoggedRequest, RequestLog, json_lines, located, number, whole
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile
from traces.formats.parsing import kind

TTFT, E2E = "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"
QUEUE = "gen_ai.latency.time_in_queue"
PREFILL, DECODE = "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode"
PROMPT, OUTPUT = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"
_PROMPT_OF_SGLANG = "gen_ai.usage.input_tokens"
_OUTPUT_OF_SGLANG = "gen_ai.usage.output_tokens"
_START = "start of the span"
Span = tuple[int | None, str, dict[str, Any]]  # line, path or name, attributes with the start in seconds


def read_spans(file: SourceFile) -> RequestLog:
    """The requests of all spans that have a time to first token. Raises TraceError."""
    log = RequestLog("OpenTelemetry spans", file)
    others = 0
    for line, name, attributes in _spans(file):
        if OUTPUT not in attributes and TTFT not in attributes:
            others += 1
            continue
        try:
            row = _row(name, attributes, line)
        except RowError as error:
            raise located(file, line, error) from error
        if row is None:
            log.drop("no time to first token")
        else:
            log.rows.append(row)
    if others:
        log.notes.append(f"{file.name}: {others:,} spans are not of requests and were left out.")
    return log


def _row(name: str, attributes: dict[str, Any], line: int | None) -> LoggedRequest | None:
    if attributes.get(TTFT) is None or not attributes.get(OUTPUT):
        return None
    arrival = number(attributes, _START)
    first = arrival + number(attributes, TTFT)
    prefill = number(attributes, PREFILL) if attributes.get(PREFILL) is not None else None
    queue = number(attributes, QUEUE) if attributes.get(QUEUE) is not None else None
    decode = number(attributes, DECODE) if attributes.get(DECODE) is not None else None
    last = arrival + number(attributes, E2E) if decode is None else first + decode
    scheduled = first - prefill if prefill is not None and queue is not None else None
    queued = None
    if scheduled is not None and queue is not None:
        queued = max(scheduled - queue, arrival)  # a wall clock in a double is exact to 0.2 us
    output = whole(attributes, OUTPUT, 1)
    prompt = whole(attributes, PROMPT, 1)
    return LoggedRequest(
        str(attributes.get("gen_ai.request.id", name)),
        arrival, first, max(last, first), prompt, output, queued, scheduled, line=line,
    )  # fmt: skip


def _spans(file: SourceFile) -> Iterator[Span]:
    if '"resourceSpans"' in file.first_line:
        for line, record in json_lines(file):
            yield from _otlp(file, line, record)
        return
    document = JsonDocument(file)
    if "resourceSpans" in document.value:
        yield from _otlp(file, None, document.value)
        return
    for place, trace in enumerate(document.items(("data",))):
        for number_, span in enumerate(trace.get("spans", ()) if isinstance(trace, dict) else ()):
            yield _jaeger(document, ("data", place, "spans", number_), span)


def _otlp(file: SourceFile, line: int | None, record: dict[str, Any]) -> Iterator[Span]:
    try:
        for place, resource in enumerate(record["resourceSpans"]):
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    yield line, str(span.get("spanId", place)), _otlp_attributes(span)
    except RowError as error:
        raise located(file, line, error) from error
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"not in the form of OTLP: {error} is missing or of another kind"
        raise TraceError(file.path, line, "resourceSpans", reason) from error


def _otlp_attributes(span: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in span.get("attributes", ()):
        value = attribute["value"]
        text = next(
            (value[name] for name in ("intValue", "doubleValue", "stringValue") if name in value), None
        )
        found[attribute["key"]] = _plain(text) if "stringValue" not in value else text
    found[_START] = _whole_number(span, "startTimeUnixNano") / 1e9
    return _named_alike(found)


def _jaeger(document: JsonDocument, path: tuple[str | int, ...], span: Any) -> Span:
    if not isinstance(span, dict) or not isinstance(span.get("tags"), list):
        raise document.error(path, RowError("tags", f"list expected, found {kind(span)}"))
    found = {tag["key"]: tag.get("value") for tag in span["tags"] if isinstance(tag, dict) and "key" in tag}
    try:
        found[_START] = _whole_number(span, "startTime") / 1e6
    except RowError as error:
        raise document.error(path, error) from error
    return None, str(span.get("spanID", "")), _named_alike(found)


def _named_alike(found: dict[str, Any]) -> dict[str, Any]:
    """The attributes under vLLM's names; newer conventions call the counts input and output tokens."""
    for name, other in ((PROMPT, _PROMPT_OF_SGLANG), (OUTPUT, _OUTPUT_OF_SGLANG)):
        if name not in found and other in found:
            found[name] = found[other]
    return found


def _whole_number(record: dict[str, Any], key: str) -> int:
    """An integer that OTLP writes as a string. Raises RowError."""
    value = _plain(record.get(key))
    if not isinstance(value, int) or isinstance(value, bool):
        raise RowError(key, f"whole number expected, found {kind(record.get(key))}")
    return value


def _plain(value: Any) -> Any:
    """A number that is written as a string, as OTLP does for 64-bit integers."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
