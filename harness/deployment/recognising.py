"""What each file of a folder is: it is recognised by its content and read by the reader of its format."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.deployment.bench_result import KEYS, read_bench_result
from harness.deployment.client_exports import PLAIN_COLUMNS, read_aiperf, read_guidellm, read_plain
from harness.deployment.log import Timeseries
from harness.deployment.recorder_log import SERIES_COLUMNS, read_recorded_requests, read_recorded_series
from harness.deployment.rows import RequestLog
from harness.deployment.server_log import is_server_log, read_server_log
from harness.deployment.settings import EngineSettings
from harness.deployment.settings_files import (
    is_command,
    is_json_settings,
    read_command,
    read_json_settings,
    read_yaml_settings,
)
from harness.deployment.sglang_log import is_sglang_log, read_sglang_requests
from harness.deployment.span_log import read_spans
from harness.deployment.stored_blocks import BlockEvents, read_block_events
from harness.deployment.vllm_request_log import is_request_log, read_vllm_requests
from traces.errors import TraceError
from traces.formats.files import SourceFile, open_source
from traces.formats.kv_events import is_events
from traces.reading import read_trace
from traces.trace import Trace

_JSON = (".json", ".jsonl")  # such a file must be what its name says
_LOOK_LINES, _LOOK_BYTES = 3000, 1 << 20  # the part of a file by which it is recognised
_KEY = re.compile(r'"(\w+)"\s*:')


@dataclass
class Found:
    """What the files of a folder turned out to be."""

    requests: list[RequestLog] = field(default_factory=list)
    printed: list[tuple[SourceFile, Timeseries]] = field(
        default_factory=list
    )  # by a server, every few seconds
    series: list[tuple[SourceFile, Timeseries]] = field(default_factory=list)
    workloads: list[tuple[SourceFile, Trace]] = field(default_factory=list)
    settings: list[tuple[SourceFile, EngineSettings]] = field(default_factory=list)
    printed_requests: list[RequestLog] = field(default_factory=list)  # the same of requests
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # token ids by request
    events: list[tuple[Path, BlockEvents]] = field(default_factory=list)  # KV cache events
    notes: list[str] = field(default_factory=list)


_Reader = Callable[[SourceFile, Found], None]


def read_path(path: Path, found: Found, *, alone: bool) -> None:
    """Read a file. What is no text is named in the notes, unless it is all there is."""
    if is_events(path):
        found.events.append((path, read_block_events(path)))
        return
    try:
        file = open_source(path)
    except TraceError as error:
        if alone or path.suffix in _JSON:
            raise
        found.notes.append(f"{path.name}: not read: {error.reason}.")
        return
    _read_file(file, found)


def _read_file(file: SourceFile, found: Found) -> None:
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
            raise TraceError(
                file.path, line, None, f"is no JSON ({error}); mend it or take it out of the folder"
            ) from None


class _Head:
    """The beginning of a file, by which its kind is recognised."""

    def __init__(self, file: SourceFile) -> None:
        self.name = file.name
        self.first = file.first_line.strip()
        raw = b"\n".join(line for _, (_, line) in zip(range(_LOOK_LINES), file.lines(), strict=False))
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


def _log(read: Callable[[SourceFile], RequestLog]) -> _Reader:
    def add(file: SourceFile, found: Found) -> None:
        found.requests.append(read(file))

    return add


def _settings(read: Callable[[SourceFile], EngineSettings]) -> _Reader:
    def add(file: SourceFile, found: Found) -> None:
        found.settings.append((file, read(file)))

    return add


def _recorded_series(file: SourceFile, found: Found) -> None:
    series, notes = read_recorded_series(file)
    found.series.append((file, series))
    found.notes += notes


def _workload(file: SourceFile, found: Found) -> None:
    found.workloads.append((file, read_trace(file.path, "pagetwin")))


def _server_log(file: SourceFile, found: Found) -> None:
    settings, series, notes = read_server_log(file)
    requests, prompts = read_vllm_requests(file)
    found.prompts |= prompts
    if requests.rows:
        found.printed_requests.append(requests)
    if settings.given():
        found.settings.append((file, settings))
    found.notes += notes
    if series is not None:
        found.printed.append((file, series))


READERS: dict[str, tuple[Callable[[_Head], bool], _Reader]] = {
    "requests.jsonl of LLMServingSim's recorder": (
        lambda head: head.has("input_toks", "queued_ts"),
        _log(read_recorded_requests),
    ),
    "its timeseries.csv": (
        lambda head: head.first.startswith(",".join(SERIES_COLUMNS[:2])),
        _recorded_series,
    ),
    "a trace of PageTwin": (lambda head: head.has("header"), _workload),
    "the result of `vllm bench serve --save-detailed`": (
        lambda head: head.has(*KEYS),
        _log(read_bench_result),
    ),
    "OpenTelemetry spans (OTLP JSON, Jaeger)": (
        lambda head: "resourceSpans" in head.object or ("data" in head.object and '"spans"' in head.text),
        _log(read_spans),
    ),
    "GuideLLM's JSON": (lambda head: head.has("benchmarks"), _log(read_guidellm)),
    "AIPerf's profile_export.jsonl": (
        lambda head: all(f'"{word}"' in head.text for word in ("metadata", "metrics", "request_start_ns")),
        _log(read_aiperf),
    ),
    "SGLang's request log": (lambda head: is_sglang_log(head.text), _log(read_sglang_requests)),
    "a CSV of " + ", ".join(PLAIN_COLUMNS): (
        lambda head: {"arrival_s", "first_token_s"} <= set(head.first.split(",")),
        _log(read_plain),
    ),
    "JSON lines with the same names": (
        lambda head: head.has("arrival_s", "first_token_s"),
        _log(read_plain),
    ),
    "the engine's arguments as JSON": (
        lambda head: head.first.startswith("{") and is_json_settings(head.object),
        _settings(read_json_settings),
    ),
    "vLLM's YAML for --config": (
        lambda head: head.name.endswith((".yaml", ".yml")),
        _settings(read_yaml_settings),
    ),
    "a server's log": (lambda head: is_server_log(head.text) or is_request_log(head.text), _server_log),
    "a command line": (lambda head: is_command(head.text), _settings(read_command)),
}
