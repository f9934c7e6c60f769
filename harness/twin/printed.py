"""What an engine prints: its settings and pool, its state every few seconds, and requests as they come and end.

Server log: `vllm/v1/metrics/loggers.py`, `v1/core/kv_cache_utils.py`, `v1/engine/core.py`, `entrypoints/utils.py` of
vLLM 0.19.0 and the same lines of 0.8.5 and 0.10.2; `sglang/srt/managers/scheduler.py` and `metrics_reporter.py` of
SGLang 0.5.23. Its clock has whole seconds and, in vLLM, no year: a line half a year before the one above it is of the
next year.

vLLM's own request log (`--enable-log-requests`): `vllm/entrypoints/logger.py` and `openai/chat_completion/serving.py`
of vLLM 0.19.0, 0.10.2 and 0.8.5. The ids of a prompt stand in `Received request` (0.10 and before, INFO) or in
`Request ... details` (0.19, DEBUG). Only answers that are streamed to a chat have a line for each chunk
(`--enable-log-outputs`), which gives the first and the last token. The clock has whole seconds, unless the user's
logging configuration adds fractions.

SGLang's log of requests, `--log-requests` as JSON or text, and `--export-metrics-to-file`
(`sglang/srt/utils/request_logger.py`, `observability/req_time_stats.py` and `request_metrics_exporter.py` of SGLang
0.5.23). A finished request has a `meta_info` with `prompt_tokens`, `completion_tokens`, `cached_tokens`,
`request_received_ts` and `request_finished_ts` (wall clock, seconds), `first_token_latency` (newer versions) or
`decode_throughput`, which gives the same: (completion_tokens - 1) / decode_throughput from first to last token.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import ceil
from typing import Any

import numpy as np

from harness.twin.log import Timeseries
from harness.twin.rows import LoggedRequest, RequestLog, placed
from harness.twin.settings import SGLANG, VLLM, EngineSettings
from traces.errors import RowError
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import (
    MAX_INTEGER,
    integers,
    maybe_number,
    maybe_whole,
    number,
    plain_integer,
    read_object,
    read_value,
    whole,
)

# -- settings and state -----------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_VLLM_STATE = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: [\d.]+ tokens/s, "
    r"Avg generation throughput: [\d.]+ tokens/s, Running: (?P<running>\d+) reqs, "
    r"(?:Swapped: \d+ reqs, )?(?:Waiting|Pending): (?P<waiting>\d+) reqs"
    r".*?\w+ KV cache usage: (?P<kv>[\d.]+)%(?:.*?\bPrefix cache hit rate: (?P<hits>[\d.]+)%)?"
)
_SGLANG_STATE = re.compile(
    r"(?: DP(?P<engine>\d+)\b[^\]]*\] )?(?:Decode|Prefill) batch.*?#running-req: (?P<running>\d+)"
    r".*?#queue-req: (?P<waiting>\d+)"
)
_SGLANG_USE = re.compile(r"token usage: (?P<kv>[\d.]+)")
_SAID = {  # by vLLM, of a setting
    "version": r"(?:LLM engine \(v|API server version )(\d+\.\d+[\w.+]*)",
    "pool_tokens": r"\w+ KV cache size: ([\d,]+) tokens",
    "pool_blocks": r"(?i)# (?:gpu|cuda) blocks: (\d+)",
    "async_scheduling": r"Asynchronous scheduling is (enabled|disabled)",
    "max_batched_tokens": r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)",
    "max_model_len": r"(?:Using max model len|Maximum concurrency for) ([\d,]+)",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _SAID.items()}
_ARGS = "non-default args: "
_CONFIG = "with config: "
_PAIR = re.compile(r"\b(\w+)=('[^']*'|\"[^\"]*\"|[^,\s()]+)")
# What the line of vLLM's whole configuration gives, and calls otherwise than the options.
_CONFIG_NAMES = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}
_CONFIG_KEYS = (
    *("model", "dtype", "max_seq_len", "speculative_config"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("quantization", "kv_cache_dtype", "enable_prefix_caching", "chunked_prefill_enabled"),
    *("enable_chunked_prefill", "decode_context_parallel_size"),
)
_SGLANG_POOL = ("max_total_num_tokens", "chunked_prefill_size", "max_running_requests", "context_len")
_SERVER_MARKS = (
    *(_ARGS, _CONFIG, " KV cache size: ", "Avg prompt throughput", "server_args=", "max_total_num_tokens="),
    *("# GPU blocks", "# cuda blocks", "Decode batch"),
)


def is_server_log(text: str) -> bool:
    """Whether a text has lines that an engine prints."""
    return any(mark in text for mark in _SERVER_MARKS)


def read_server_log(file: SourceFile) -> tuple[EngineSettings, Timeseries | None, list[str]]:
    """The settings, the series on the log's own clock (None: no line on the state), and notes. Raises TraceError.

    Of the same option a later line wins over an earlier one.
    """
    found = EngineSettings()
    states: list[tuple[float, str, list[float]]] = []
    starts: set[str] = set()
    calendar = _Calendar()
    for line, raw in file.lines():
        with placed(file, line):
            words = _ANSI.sub("", decode(raw))
            starts |= {words.partition(mark)[2].strip() for mark in (_ARGS, "server_args=") if mark in words}
            for settings in _said(words, file.name):
                found = settings.filled(found)
            states += ((calendar.dated(at_s), engine, values) for at_s, engine, values in _state(words))
    if found.engine == "vllm" and found.pool_tokens is not None:  # rounded down, and with vLLM's null block
        size, longest = found.block_size or 16, found.max_model_len or 0
        blocks = round(found.pool_tokens / size)
        if found.pool_tokens % size and longest % size:  # longest requests that there is room for, in blocks
            blocks = ceil(found.pool_tokens * -(-longest // size) / longest)
        found = found.changed(found.origin["pool_tokens"], pool_tokens=(blocks - 1) * size)
    notes = [f"{file.name}: its clock has whole seconds, and so has the series."] if states else []
    if len(starts) > 1:
        first = f"Warning: {file.name}: a server was started {len(starts)} times with different arguments; "
        notes.append(f"{first}the last of each counts. Keep the part of the log of the server that answered.")
    series = _series(states) if states else None
    if series is not None and calendar.skips:  # its dates are not those of the year 2000
        series = replace(series, began_s=None)
        notes.append(
            f"{file.name}: its clock names no year, and no line is of 29 February: taken to be no leap year."
        )
    return found, series, notes


def _said(words: str, where: str) -> Iterator[EngineSettings]:
    place = words.find(_ARGS)
    if place >= 0:
        yield VLLM.read(_arguments(words[place + len(_ARGS) :]), where)
    place = words.find(_CONFIG)
    if place >= 0 and "LLM engine" in words:
        yield VLLM.read(_pairs(words[place:], _CONFIG_KEYS, _CONFIG_NAMES), where)
    for name, pattern in _PATTERNS.items():
        if said := pattern.search(words):
            value: Any = said[1]
            if name == "async_scheduling":
                value = value == "enabled"
            elif name != "version":
                value = plain_integer(value.replace(",", ""), name, 0)
            yield EngineSettings("vllm").changed(where, **{name: value})
    if "server_args=" in words:
        yield SGLANG.read(_pairs(words.partition("server_args=")[2]), where)
    elif "max_total_num_tokens=" in words:
        yield SGLANG.read(_pairs(words, _SGLANG_POOL, {"context_len": "context_length"}), where)


def _pairs(
    words: str, wanted: tuple[str, ...] | None = None, names: dict[str, str] | None = None
) -> dict[str, Any]:
    """The pairs `name=value` of a line, those that are `wanted`, under other `names`. Of a name the first one counts:
    objects behind it may have members that are called so.
    """
    found = {name: _plain(value) for name, value in reversed(_PAIR.findall(words))}
    return {(names or {}).get(name, name): found[name] for name in wanted or found if name in found}


def _plain(value: str) -> Any:
    """A value as Python writes it; what is none stays text."""
    known = {"None": None, "True": True, "False": False}
    return known[value] if value in known else value.strip("'\"")


def _literal(text: str) -> Any:
    """A value as Python writes it; None where it is none that can be read."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _arguments(text: str) -> dict[str, Any]:
    """The dictionary of vLLM's arguments. Values that are objects, which no literal can be, are taken as text."""
    found = _literal(text.strip())
    if found is None:
        pairs = re.findall(r"'(\w+)': ('[^']*'|\"[^\"]*\"|[^,{}\[\]()]+)(?=[,}])", text)
        found = {name: _plain(value) for name, value in pairs}
    if not isinstance(found, dict) or not found:
        raise RowError("non-default args", "no readable dictionary (cut line?)")
    if "model_tag" in found and "model" not in found:
        found["model"] = found["model_tag"]
    return found


def _state(words: str) -> Iterator[tuple[float, str, list[float]]]:
    """Time in seconds, engine, and running, waiting, KV use and share of cache hits of a line on the state."""
    if state := _VLLM_STATE.search(words):
        values = [float(state[name] or 0) for name in ("running", "waiting", "kv", "hits")]
        values[2:] = [percent / 100 for percent in values[2:]]
        yield _seconds(words, "the engine's state", _VLLM_TIME)[0], state["engine"] or "0", values
    elif state := _SGLANG_STATE.search(words):
        use = _SGLANG_USE.search(words)
        values = [float(state["running"]), float(state["waiting"]), float(use["kv"]) if use else np.nan, 0.0]
        yield _seconds(words, "the engine's state", _SGLANG_TIME)[0], state["engine"] or "0", values


YEAR_S = 366 * 86_400.0  # of 2000, in which a date without a year is put: from its last day to its first one
_VLLM_TIME = re.compile(r"\b(?:INFO|WARNING|DEBUG|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d)()")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)()")
_REQUEST_TIMES = (
    re.compile(r"\b(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d+))?"),
    re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d+))?"),
)


_FEBRUARY_29_S, _DAY_S = datetime(2000, 2, 29, tzinfo=UTC).timestamp(), 86_400.0


class _Calendar:
    """Puts the times of lines, which may name no year, into their order over the end of a year.

    Where no line lies between 28 February and 1 March, the year is taken to have no day between them (`skips`).
    """

    def __init__(self) -> None:
        self._last = self._years_s = 0.0
        self.skips = False

    def dated(self, at_s: float) -> float:
        """The time of the next line."""
        march = at_s >= _FEBRUARY_29_S + _DAY_S
        self.skips |= march and 0 < self._last < _FEBRUARY_29_S
        at_s -= _DAY_S * (march and self.skips)
        self._years_s += YEAR_S * (at_s + self._years_s < self._last - YEAR_S / 2)
        self._last = at_s + self._years_s
        return self._last


def _seconds(words: str, what: str, *forms: re.Pattern[str]) -> tuple[float, bool]:
    """The time of a line on `what` in seconds, and whether it has a fraction. Raises RowError."""
    stamp = next((stamp for form in forms if (stamp := form.search(words))), None)
    if stamp is None:
        raise RowError("time", f"a line on {what} has no time of the known form")
    text = stamp[1].replace("T", " ")
    text = text if len(text) > 14 else f"2000-{text}"  # a leap year: it has every date
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise RowError("time", f"no such time: {stamp[1]}") from error
    return moment + (float(f"0.{stamp[2]}") if stamp[2] else 0.0), bool(stamp[2])


def _series(states: list[tuple[float, str, list[float]]]) -> Timeseries:
    """The last state of each engine in each second; several engines are added up, their KV use is averaged."""
    engines = sorted({engine for _, engine, _ in states})
    latest: dict[str, list[float]] = {}
    rows: dict[float, list[list[float]]] = {}
    for at, engine, values in states:
        latest[engine] = values
        if len(latest) == len(engines):
            rows[at] = [latest[name] for name in engines]
    at_s = np.array(sorted(rows))
    table = np.array([rows[at] for at in at_s])  # [instants, engines, values]
    running, waiting = table[:, :, 0].sum(axis=1), table[:, :, 1].sum(axis=1)
    kv, hits = table[:, :, 2].mean(axis=1), table[:, :, 3].mean(axis=1)
    began = datetime.fromtimestamp(at_s[0], UTC).replace(year=2000)
    return Timeseries(
        at_s - at_s[0], running, waiting, None if np.isnan(kv).any() else kv, hits, began.timestamp()
    )


# -- vLLM's requests --------------------------------------------------------------------------------------------------

_RECEIVED = re.compile(r"(?:Received request|Request) (\S+?)(?::| details:)")
_IDS = re.compile(r"prompt_token_ids: (\[[\d, ]*\])")
_DELTA = re.compile(
    r"Generated response (\S+) \(streaming delta\): .*output_token_ids: (\[[\d, ]*\]), finish_reason: "
)
_REQUEST_MARKS = ("Received request ", "Generated response ", " details: prompt: ")


@dataclass
class _Open:
    """A request that was received: when, and the times and tokens of its chunks."""

    at_s: float
    line: int
    prompt: tuple[int, ...] | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)


def is_request_log(text: str) -> bool:
    """Whether a text has lines of vLLM's request logger."""
    return any(mark in text for mark in _REQUEST_MARKS)


def read_vllm_requests(file: SourceFile) -> tuple[RequestLog, dict[str, tuple[int, ...]]]:
    """The requests whose chunks were logged, and the prompts of all requests by their id. Raises TraceError."""
    log = RequestLog("vLLM's request log", file)
    found: dict[str, _Open] = {}
    fractions, calendar = False, _Calendar()
    for line, raw in file.lines():
        with placed(file, line):
            for name, said_s, has_fraction, ids, tokens in _events(decode(raw)):
                fractions, at_s = fractions | has_fraction, calendar.dated(said_s)
                request = found.setdefault(name, _Open(at_s, line))
                request.prompt = ids or request.prompt
                if tokens:
                    request.chunks.append((at_s, tokens))
    for name, request in found.items():
        log.add(_vllm_row(name, request))
    if log.rows and not fractions:
        log.notes.append(
            f"{file.name}: its clock has whole seconds, so the times of a request are known to about a second only. "
            "Spans (--otlp-traces-endpoint) or a benchmark's result have exact times."
        )
    return log, {name: request.prompt for name, request in found.items() if request.prompt}


def _events(words: str) -> Iterator[tuple[str, float, bool, tuple[int, ...] | None, int]]:
    """Request, time, whether the time has a fraction, prompt and number of generated tokens of a line."""
    if "Generated response " in words:
        delta = _DELTA.search(words)
        if delta is not None:
            tokens = len(_ids(delta[2], "output_token_ids"))
            yield delta[1], *_seconds(words, "a request", *_REQUEST_TIMES), None, tokens
    elif is_request_log(words):
        received = _RECEIVED.search(words)
        if received is not None:
            ids = _IDS.findall(words)  # a prompt's text may hold the same words: the last ones are vLLM's
            prompt = _ids(ids[-1], "prompt_token_ids") if ids else None
            yield received[1], *_seconds(words, "a request", *_REQUEST_TIMES), prompt, 0


def _ids(text: str, field: str) -> tuple[int, ...]:
    try:
        found = read_value(text)
    except RowError as error:
        raise RowError(field, "no list of token ids (cut line?)") from error
    return tuple(integers(found, field, MAX_INTEGER))


def _vllm_row(name: str, request: _Open) -> LoggedRequest | str:
    if not request.chunks:
        return "no times of its tokens (not a streamed chat, or without --enable-log-outputs)"
    if request.prompt is None:
        return "no prompt_token_ids (vLLM after 0.10 logs them with VLLM_LOGGING_LEVEL=DEBUG)"
    tokens = sum(count for _, count in request.chunks)
    first, last, prompt = request.chunks[0][0], request.chunks[-1][0], request.prompt
    times = (request.at_s, first, last)
    return LoggedRequest(name, *times, len(prompt), tokens, prompt_ids=prompt, line=request.line)


# -- SGLang's requests ------------------------------------------------------------------------------------------------

_META = "'meta_info': "


def is_sglang_log(first_lines: str) -> bool:
    """Whether the beginning of a file is a request log of SGLang."""
    words = ('"event": "request.', "Receive: obj=", "Finish: obj=", '"request_parameters"')
    return any(word in first_lines for word in words)


def read_sglang_requests(file: SourceFile) -> RequestLog:
    """The finished requests. Lines of other kinds are passed over. Raises TraceError."""
    log = RequestLog("SGLang's request log", file)
    for line, raw in file.lines():
        with placed(file, line):
            meta = _meta(decode(raw))
            if meta is not None:
                log.add(_sglang_row(meta, line))
    return log


def _meta(text: str) -> dict[str, Any] | None:
    """The `meta_info` of a line that ends a request; None: another line."""
    start = text.find("{")
    if '"request.finished"' in text and start >= 0:
        out = read_object(text[start:]).get("out")
        meta = out.get("meta_info") if isinstance(out, dict) else None
        if not isinstance(meta, dict):
            raise RowError("out.meta_info", "missing")
        return meta
    if text.lstrip().startswith("{") and '"request_parameters"' in text:
        return read_object(text)
    if "Finish: obj=" not in text:
        return None
    place = text.rfind(_META)
    if place < 0:
        raise RowError("meta_info", "missing")
    return _dictionary(text[place + len(_META) :])


def _dictionary(text: str) -> dict[str, Any]:
    """The dictionary that a text begins with, as Python writes it."""
    end, depth = 0, 0
    for end, sign in enumerate(text):  # noqa: B007
        depth += (sign == "{") - (sign == "}")
        if not depth:
            break
    found = _literal(text[: end + 1])
    if not isinstance(found, dict):
        raise RowError("meta_info", "no readable dictionary (cut line?)")
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


def _sglang_row(meta: dict[str, Any], line: int) -> LoggedRequest | str:
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
    prompt, name = whole(meta, "prompt_tokens", 1), str(meta.get("id", line))
    return LoggedRequest(name, received, first, last, prompt, output, cached_tokens=cached, line=line)
