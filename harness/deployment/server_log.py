"""The log that an engine prints: its settings and the pool at the start, and a line on its state every few seconds.

Source: `vllm/v1/metrics/loggers.py`, `v1/core/kv_cache_utils.py`, `v1/engine/core.py`, `entrypoints/utils.py` of vLLM
0.19.0 and the same lines of 0.8.5 and 0.10.2; `sglang/srt/managers/scheduler.py` and `metrics_reporter.py` of SGLang
0.5.23. Its clock has whole seconds and, in vLLM, no year.
"""

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from harness.deployment import sglang_settings, vllm_settings
from harness.deployment.log import Timeseries
from harness.deployment.rows import located
from harness.deployment.settings import EngineSettings
from traces.errors import RowError
from traces.formats.files import SourceFile, decode

_VLLM_TIME = re.compile(r"\b(?:INFO|WARNING|DEBUG|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d)")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_VLLM_STATE = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generated>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs, "
    r"(?:Swapped: \d+ reqs, )?(?:Waiting|Pending): (?P<waiting>\d+) reqs"
    r".*?GPU KV cache usage: (?P<kv>[\d.]+)%"
)
_SGLANG_STATE = re.compile(
    r"(?:Decode|Prefill) batch.*?#running-req: (?P<running>\d+).*?#queue-req: (?P<waiting>\d+)"
)
_SGLANG_USE = re.compile(r"token usage: (?P<kv>[\d.]+)")
_POOL_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_POOL_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d+)", re.IGNORECASE)
_VERSION = re.compile(r"(?:LLM engine \(v|API server version )(\d+\.\d+[\w.+]*)")
_ARGS = "non-default args: "
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
_BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_LENGTH = re.compile(r"Using max model len (\d+)")
_CONFIG = "with config: "
_PAIR = re.compile(r"\b(\w+)=('[^']*'|\"[^\"]*\"|[^,\s()]+)")
# What the line of vLLM's whole configuration calls otherwise; the rest of its names are those of the options.
_CONFIG_NAMES = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}
_CONFIG_KEYS = (
    *(
        "model",
        "dtype",
        "max_seq_len",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
    ),
    *(
        "quantization",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "chunked_prefill_enabled",
        "enable_chunked_prefill",
    ),
    *("decode_context_parallel_size",),
)
_SGLANG_POOL = ("max_total_num_tokens", "chunked_prefill_size", "max_running_requests", "context_len")
_MARKS = (
    _ARGS,
    _CONFIG,
    "GPU KV cache size",
    "Avg prompt throughput",
    "server_args=",
    "max_total_num_tokens=",
)


def is_server_log(text: str) -> bool:
    """Whether a text has lines that an engine prints."""
    return any(mark in text for mark in (*_MARKS, "# GPU blocks", "# cuda blocks", "Decode batch"))


def read_server_log(file: SourceFile) -> tuple[EngineSettings, Timeseries | None, list[str]]:
    """The settings, the series on the log's own clock (None: no line on the state), and notes. Raises TraceError."""
    found = EngineSettings()
    states: list[tuple[float, str, list[float]]] = []
    for line, raw in file.lines():
        try:
            words = _ANSI.sub("", decode(raw))
            found = _merged(found, words, file.name)
            states += _state(words)
        except RowError as error:
            raise located(file, line, error) from error
    series = _series(states) if states else None
    notes = [] if series is None else [f"{file.name}: its clock has whole seconds, and so has the series."]
    return found, series, notes


def _merged(found: EngineSettings, words: str, where: str) -> EngineSettings:
    """The settings with what a line says of them; a later line wins over an earlier one of the same option."""
    for settings in _said(words, where):
        found = settings.filled(found)
    return found


def _said(words: str, where: str) -> Iterator[EngineSettings]:
    place = words.find(_ARGS)
    if place >= 0:
        yield vllm_settings.vllm_settings(_literal(words[place + len(_ARGS) :]), where)
    if version := _VERSION.search(words):
        yield EngineSettings(engine="vllm", version=version[1], origin={"version": where})
    place = words.find(_CONFIG)
    if place >= 0 and "LLM engine" in words:
        pairs = {name: _plain(value) for name, value in _PAIR.findall(words[place:])}
        args = {_CONFIG_NAMES.get(name, name): pairs[name] for name in _CONFIG_KEYS if name in pairs}
        yield vllm_settings.vllm_settings(args, where)
    if tokens := _POOL_TOKENS.search(words):
        yield _one(where, "vllm", pool_tokens=int(tokens[1].replace(",", "")))
    if blocks := _POOL_BLOCKS.search(words):
        yield _one(where, "vllm", pool_blocks=int(blocks[1]))
    if asynchronous := _ASYNC.search(words):
        yield _one(where, "vllm", async_scheduling=asynchronous[1] == "enabled")
    if budget := _BUDGET.search(words):
        yield _one(where, "vllm", max_batched_tokens=int(budget[1]))
    if length := _LENGTH.search(words):
        yield _one(where, "vllm", max_model_len=int(length[1]))
    if "server_args=" in words:
        yield sglang_settings.sglang_settings(
            {name: _plain(value) for name, value in _PAIR.findall(words.partition("server_args=")[2])}, where
        )
    elif "max_total_num_tokens=" in words:
        pairs = {name: _plain(value) for name, value in _PAIR.findall(words)}
        names = {"context_len": "context_length"}
        args = {names.get(name, name): pairs[name] for name in _SGLANG_POOL if name in pairs}
        yield sglang_settings.sglang_settings(args, where)


def _one(where: str, engine: str, **values: Any) -> EngineSettings:
    return EngineSettings(engine=engine, origin=dict.fromkeys(values, where), **values)


def _plain(value: str) -> Any:
    """A value as Python writes it; what is none stays text."""
    known = {"None": None, "True": True, "False": False}
    return known[value] if value in known else value.strip("'\"")


def _literal(text: str) -> dict[str, Any]:
    """The dictionary of vLLM's arguments. Values that are objects, which no literal can be, are taken as text."""
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pairs = re.findall(r"'(\w+)': ('[^']*'|\"[^\"]*\"|[^,{}\[\]()]+)(?=[,}])", text)
        found = {name: _plain(value) for name, value in pairs}
    if not isinstance(found, dict) or not found:
        raise RowError("non-default args", "no readable dictionary (cut line?)")
    if "model_tag" in found and "model" not in found:
        found["model"] = found["model_tag"]
    return found


def _state(words: str) -> Iterator[tuple[float, str, list[float]]]:
    """Time in seconds, engine, and running, waiting, KV use, prompt and generated tokens/s of a line on the state."""
    if state := _VLLM_STATE.search(words):
        values = [float(state[name]) for name in ("running", "waiting", "kv", "prompt", "generated")]
        values[2] /= 100
        yield _seconds(_VLLM_TIME, "%m-%d %H:%M:%S", words), state["engine"] or "0", values
    elif state := _SGLANG_STATE.search(words):
        use = _SGLANG_USE.search(words)
        kv = float(use["kv"]) if use else float("nan")
        row = [float(state["running"]), float(state["waiting"]), kv, float("nan"), float("nan")]
        yield _seconds(_SGLANG_TIME, "%Y-%m-%d %H:%M:%S", words), "0", row


def _seconds(pattern: re.Pattern[str], form: str, words: str) -> float:
    stamp = pattern.search(words)
    if stamp is None:
        raise RowError("time", "a line on the engine's state has no time of the known form")
    text = stamp[1] if form.startswith("%Y") else f"2000-{stamp[1]}"  # a leap year: it has every date
    try:
        moment = datetime.strptime(text, form if form.startswith("%Y") else f"%Y-{form}")
    except ValueError as error:
        raise RowError("time", f"no such time: {stamp[1]}") from error
    return moment.replace(tzinfo=UTC).timestamp()


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
    running, waiting, prompt, generated = (table[:, :, column].sum(axis=1) for column in (0, 1, 3, 4))
    has_rates = not np.isnan(prompt).any()
    kv = table[:, :, 2].mean(axis=1)
    return Timeseries(
        at_s - at_s[0],
        running,
        waiting,
        None if np.isnan(kv).any() else kv,
        prompt if has_rates else None,
        generated if has_rates else None,
    )
