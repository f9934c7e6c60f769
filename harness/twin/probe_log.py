"""The log of `pagetwin_probe`: what a vLLM server did in every step, and its requests, on the engine's own clock.

The format is described in `harness/twin/pagetwin_probe.py`. A log may lie in several files, which follow one another;
the first may be gone, and the last line may be cut by a kill.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.twin.log import Timeseries
from harness.twin.rows import LoggedRequest, RequestLog, placed
from harness.twin.settings import VLLM, EngineSettings
from harness.twin.steps import LoggedSteps, StepLine, StepReader
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile
from traces.formats.parsing import as_whole, read_object, require_list, require_object

FORMAT = 1  # of the log; that of `pagetwin_probe`, which lies elsewhere in a wheel: at its top
_ENDS = ("stop", "length")  # of requests that ended well
_NO_OPTIONS = ("scheduler", "prefix_caching_hash_algo", "num_gpu_blocks")
_NS = 1e-9


@dataclass
class ProbeLog:
    """What a probe's files hold."""

    requests: RequestLog
    settings: EngineSettings
    series: Timeseries | None
    steps: LoggedSteps | None
    notes: list[str]


@dataclass
class _Request:
    """A request that was queued; times in ns."""

    id: str
    prompt_tokens: int
    arrival: int
    queued: int
    hashes: tuple[str, ...] | None
    line: int
    scheduled: int | None = None
    cached: int = 0


@dataclass
class _Reader:
    """The state of reading line after line."""

    log: RequestLog
    batch: StepReader
    requests: dict[int, _Request] = field(default_factory=dict)
    # start, policy, model, commit, running, waiting, free
    steps: list[tuple[int, ...]] = field(default_factory=list)
    lost: int = 0

    def read(self, record: Mapping[str, Any], line: int) -> None:
        """A line that is no head. Raises RowError."""
        if "req" in record:
            self._queued(record, line)
        elif "step" in record:
            self._step(record)
        elif "end" in record:
            self._ended(record, line)
        else:
            self.lost += as_whole(record.get("lost"), "lost")

    def _queued(self, record: Mapping[str, Any], line: int) -> None:
        number, name, prompt, _, arrival, queued, _ = _fields(record, "req", 7)
        known = None if record.get("hashes") is None else _hashes(record)
        queued = as_whole(queued, "req")
        arrival = min(_signed(arrival, "req"), queued)  # two clocks of one machine
        prompt, number = as_whole(prompt, "req", 1), as_whole(number, "req")
        self.requests[number] = _Request(str(name), prompt, arrival, queued, known, line)
        self.batch.queued(number, prompt)

    def _step(self, record: Mapping[str, Any]) -> None:
        began, *parts = (as_whole(one, "t") for one in _fields(record, "t", 4))
        free = as_whole(_fields(record, "free", 2)[0], "free")
        running, waiting = (as_whole(record.get(name), name) for name in ("run", "wait"))
        self.steps.append((began, *parts, running, waiting, free))
        enter, several = (_triples(record, name) for name in ("in", "part"))
        absent, preempted = (_numbers(record.get(name, []), name) for name in ("off", "out"))
        rows, told = as_whole(record.get("rows"), "rows"), StepLine(enter, several, absent, preempted)
        self.batch.step((began, *parts), rows, waiting, told)
        for number, cached, _ in enter:
            entering = self.requests.get(number)
            if entering is not None and entering.scheduled is None:
                entering.scheduled, entering.cached = began, cached

    def _ended(self, record: Mapping[str, Any], line: int) -> None:
        number, reason, tokens, first, at, _ = _fields(record, "end", 6)
        number = as_whole(number, "end")
        self.batch.ended(number)
        request = self.requests.pop(number, None)
        if request is None:
            self.log.add("queued before the log begins")
        elif reason not in _ENDS or first is None or request.scheduled is None:
            self.log.add(f"ended by {reason}")
        else:
            self.log.add(
                LoggedRequest(
                    request.id,
                    request.arrival * _NS,
                    as_whole(first, "end") * _NS,
                    as_whole(at, "end") * _NS,
                    request.prompt_tokens,
                    as_whole(tokens, "end", 1),
                    queued_s=request.queued * _NS,
                    scheduled_s=request.scheduled * _NS,
                    cached_tokens=min(request.cached, request.prompt_tokens),
                    hash_ids=request.hashes,
                    answer_ids=_hashes(record),
                    line=request.line,
                )
            )


def read_probe(files: Sequence[SourceFile]) -> ProbeLog:
    """The log that these files hold, in any order. Raises TraceError."""
    heads = [(_head(file), file) for file in files]
    heads.sort(key=lambda pair: as_whole(pair[0].get("file"), "file"))
    head, first = heads[0]
    for other, file in heads:
        if other.get("pid") != head.get("pid"):
            reason = f"is of another engine than {first.name}; read the files of one engine at a time"
            raise TraceError(file.path, 1, "pid", reason)
    with placed(first, 1):
        config = require_object(head.get("config"), "config")
        batch = StepReader(as_whole(config.get("block_size"), "block_size", 1))
    reader, notes = _Reader(RequestLog("PageTwin's probe of vLLM", first), batch), list[str]()
    for place, (_, file) in enumerate(heads):
        for line, record in _records(file, notes, last=place == len(heads) - 1):
            with placed(file, line):
                reader.read(record, line)
    for _ in reader.requests:
        reader.log.add("not ended when the log ends")
    with placed(first, 1):
        if head.get("hash_block_tokens") is not None:
            reader.log.block_tokens = as_whole(head["hash_block_tokens"], "hash_block_tokens", 1)
        told = {name: value for name, value in config.items() if name not in _NO_OPTIONS}
        pool = as_whole(config.get("num_gpu_blocks"), "num_gpu_blocks", 2) - 1  # without vLLM's null block
        told["num_gpu_blocks_override"] = pool + 1
        settings = VLLM.read(told, first.name, str(head.get("vllm")))
    if reader.lost:
        notes.append(f"{first.name}: {reader.lost:,} lines were lost: the disk of the server was too slow.")
    if not reader.steps:
        return ProbeLog(reader.log, settings, None, None, notes)
    steps = np.array(reader.steps, dtype=np.float64)
    notes.append(_split(first.name, steps))
    series = Timeseries((steps[:, 0] + steps[:, 1]) * _NS, steps[:, 4], steps[:, 5], 1 - steps[:, 6] / pool)
    return ProbeLog(reader.log, settings, series, batch.steps(), notes)


def _split(name: str, steps: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """How the time of the steps is divided, in a sentence."""
    policy, model, commit = (steps[:, place].sum() for place in (1, 2, 3))
    share = 100 / (policy + model + commit)
    return (
        f"{name}: {len(steps):,} steps of {np.median(steps[:, 1:4].sum(axis=1)) / 1e6:.2f} ms in the median; of their "
        f"time {model * share:.1f} % is the model's and waiting for it, {policy * share:.1f} % schedule(), "
        f"{commit * share:.1f} % update_from_output()."
    )


def _head(file: SourceFile) -> Mapping[str, Any]:
    with placed(file, 1):
        head = read_object(file.first_line)
        if head.get("pagetwin_probe") != FORMAT:
            reason = f"found {head.get('pagetwin_probe')}, and format {FORMAT} is read here"
            raise RowError("pagetwin_probe", reason)
    return head


def _records(file: SourceFile, notes: list[str], *, last: bool) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects behind the head with their lines. The last line of the last file may be cut by a kill."""
    lines = [(number, raw) for number, raw in file.lines() if raw.strip()][1:]
    for place, (line, raw) in enumerate(lines):
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:
            if last and place == len(lines) - 1:
                notes.append(f"{file.name}: its last line is cut, as by a server that was killed.")
                return
            raise TraceError(file.path, line, None, f"is no JSON ({error})") from error
        with placed(file, line):
            yield line, require_object(record, "line")


def _list(value: object, name: str, length: int) -> list[Any]:
    found = require_list(value, name)
    if len(found) != length:
        raise RowError(name, f"{length} values expected, found {len(found)}")
    return found


def _fields(record: Mapping[str, Any], name: str, length: int) -> list[Any]:
    return _list(record.get(name), name, length)


def _hashes(record: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, require_list(record.get("hashes", []), "hashes")))


def _numbers(value: object, name: str) -> list[int]:
    return [as_whole(one, name) for one in require_list(value, name)]


def _triples(record: Mapping[str, Any], name: str) -> list[list[int]]:
    return [_numbers(_list(row, name, 3), name) for row in require_list(record.get(name, []), name)]


def _signed(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowError(name, f"whole number expected, found {value}")
    return value
