"""SGLang's log of requests: `--log-requests` as JSON or text, and `--export-metrics-to-file`.

Source: `sglang/srt/utils/request_logger.py`, `observability/req_time_stats.py` and `request_metrics_exporter.py` of
SGLang 0.5.23. A finished request has a `meta_info` with `prompt_tokens`, `completion_tokens`, `cached_tokens`,
`request_received_ts` and `request_finished_ts` (wall clock, seconds), `first_token_latency` (newer versions) or
`decode_throughput`, which gives the same: (completion_tokens - 1) / decode_throughput from first to last token.
"""

import ast
import json
from collections.abc import Iterator
from typing import Any

from harness.deployment.rows import (
    LoggedRequest,
    RequestLog,
    located,
    maybe_number,
    maybe_whole,
    number,
    whole,
)
from traces.errors import RowError
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import read_object

_META = "'meta_info': "


def read_sglang_requests(file: SourceFile) -> RequestLog:
    """The finished requests. Lines of other kinds are passed over. Raises TraceError."""
    log = RequestLog("SGLang's request log", file)
    for line, raw in file.lines():
        try:
            for meta in _meta(decode(raw)):
                row = _row(meta, line)
                if isinstance(row, str):
                    log.drop(row)
                else:
                    log.rows.append(row)
        except RowError as error:
            raise located(file, line, error) from error
    return log


def is_sglang_log(first_lines: str) -> bool:
    """Whether the beginning of a file is a request log of SGLang."""
    words = ('"event": "request.', "Receive: obj=", "Finish: obj=", '"request_parameters"')
    return any(word in first_lines for word in words)


def _meta(text: str) -> Iterator[dict[str, Any]]:
    """The `meta_info` of a line that ends a request."""
    start = text.find("{")
    if '"request.finished"' in text and start >= 0:
        out = read_object(text[start:]).get("out")
        meta = out.get("meta_info") if isinstance(out, dict) else None
        if not isinstance(meta, dict):
            raise RowError("out.meta_info", "missing")
        yield meta
    elif text.lstrip().startswith("{") and '"request_parameters"' in text:
        yield read_object(text)
    elif "Finish: obj=" in text:
        place = text.rfind(_META)
        if place < 0:
            raise RowError("meta_info", "missing")
        yield _literal(text[place + len(_META) :])


def _literal(text: str) -> dict[str, Any]:
    """The dictionary that a text begins with, as Python writes it."""
    end, depth = 0, 0
    for end, sign in enumerate(text):  # noqa: B007
        depth += (sign == "{") - (sign == "}")
        if not depth:
            break
    try:
        found = ast.literal_eval(text[: end + 1])
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise RowError("meta_info", "no readable dictionary (cut line?)") from error
    if not isinstance(found, dict):
        raise RowError("meta_info", "no readable dictionary")
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


def _row(meta: dict[str, Any], line: int) -> LoggedRequest | str:
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return "aborted"
    output = whole(meta, "completion_tokens")
    if not output:
        return "no output token"
    received = maybe_number(meta, "request_received_ts")
    if received is None:
        return "no request_received_ts (start SGLang with --enable-metrics)"
    ended = maybe_number(meta, "request_finished_ts")
    last = received + number(meta, "e2e_latency") if ended is None else ended
    latency, throughput = maybe_number(meta, "first_token_latency"), maybe_number(meta, "decode_throughput")
    if latency is not None:
        first = received + latency
    elif output == 1:
        first = last
    elif throughput is not None and throughput > 0:
        first = last - (output - 1) / throughput
    else:
        return "no first_token_latency and no decode_throughput"
    cached = maybe_whole(meta, "cached_tokens")
    name = str(meta.get("id", line))
    return LoggedRequest(
        name, received, first, last, whole(meta, "prompt_tokens", 1), output, cached_tokens=cached, line=line
    )
