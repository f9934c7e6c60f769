"""Mooncake JSONL: arrivals in ms, lengths, and chained ids of 512-token blocks. Other tools read this format too.

The partial last block has its own id, so reuse is understated by up to one block per turn. The arrivals of the
conversation trace are on ticks of 3 s with a few ms of jitter. `write_mooncake` writes this format: a block id then
identifies the prompt from its start to the end of that block, so only the sharing of whole blocks is kept.
"""

import json
from math import gcd
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.errors import RowError
from traces.formats.parsing import in_range, integer, integers, read_object, require_keys
from traces.formats.rows import Row, Rows, note
from traces.formats.segments import BlockSegments, ChainCheck
from traces.trace import CHAINED, Trace, TraceRequest

BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_NS_PER_MS = 1_000_000
_JITTER_MS = 10  # times are rounded to it before ticks are looked for; the published jitter is 3 ms
_SHORTEST_TICK_MS = 1_000
_FEWEST_TICKS = 4  # chance at most (10 ms / 1 s)^4, so that a few round times are not taken for ticks
Ints = npt.NDArray[np.int64]
Piece = tuple[int | None, int, int]  # key, where in the segment, tokens


class MooncakeReader:
    """Rows of a Mooncake trace. The reader checks that ids are chained."""

    format = "mooncake"
    key_kind = CHAINED
    source_block_tokens: int | None = BLOCK_TOKENS
    time_field = "timestamp"
    has_header = False
    has_clock = True
    is_ordered = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}
        self._chain = ChainCheck()
        self._ticks = _TickFinder()

    def read_header(self, text: str) -> None:
        """Never called: JSONL has no header."""

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds from the start of the recording; segments of 512 tokens and the rest."""
        record = read_object(text)
        require_keys(record, _KEYS)
        time_ms = in_range(integer(record, "timestamp", "milliseconds"), "timestamp", 0)
        prompt = in_range(integer(record, "input_length"), "input_length", 1)
        output = in_range(integer(record, "output_length"), "output_length", 0)
        ids = block_ids(record["hash_ids"], prompt)
        if len(record) > len(_KEYS):
            for key in record.keys() - _KEYS:
                note(self.noted, f"unknown key {key}")
        segments = BlockSegments(np.array(ids, np.int64), BLOCK_TOKENS, prompt)
        return Row(time_ms * _NS_PER_MS, prompt, output, segments)

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Check that every id has one parent and one position in the whole file."""
        self._chain.check_row([key for key, _ in row.segments if key is not None], line)
        assert row.time_ns is not None  # every row of this format has a time
        self._ticks.add(np.array([row.time_ns // _NS_PER_MS]))
        return row

    def read_block(self, lines: list[bytes], first_line: int, last_ns: int | None) -> Rows | None:
        """Many rows at once, parsed and checked as columns. None if any row is doubtful."""
        columns = _columns(lines)
        if columns is None:
            return None
        times, prompts, outputs, ids, starts = columns
        if not _valid_columns(columns, last_ns) or not self._chain.check_block(ids, starts, first_line):
            return None
        self._ticks.add(times)
        ends = starts.tolist()
        numbers = zip(times.tolist(), prompts.tolist(), outputs.tolist(), ends, ends[1:], strict=False)
        rows = (
            Row(time * _NS_PER_MS, prompt, output, BlockSegments(ids[start:end], BLOCK_TOKENS, prompt))
            for time, prompt, output, start, end in numbers
        )
        return int(times[-1]) * _NS_PER_MS, rows

    def clock_quantum_us(self) -> int:
        """The tick that all arrivals share, apart from jitter, or one millisecond if there is none."""
        return self._ticks.quantum_us()


class _TickFinder:
    """The greatest common divisor of all times, rounded to the jitter."""

    def __init__(self) -> None:
        self._divisor = 0
        self._some: set[int] = set()

    def add(self, times_ms: npt.NDArray[np.int64]) -> None:
        rounded = np.unique((times_ms + _JITTER_MS // 2) // _JITTER_MS)
        self._divisor = gcd(self._divisor, int(np.gcd.reduce(rounded)))
        if len(self._some) < _FEWEST_TICKS:
            self._some.update(rounded[rounded > 0][:_FEWEST_TICKS].tolist())

    def quantum_us(self) -> int:
        tick_ms = self._divisor * _JITTER_MS
        is_tick = len(self._some) >= _FEWEST_TICKS and tick_ms >= _SHORTEST_TICK_MS
        return tick_ms * 1_000 if is_tick else 1_000


def _columns(lines: list[bytes]) -> tuple[Ints, Ints, Ints, Ints, Ints] | None:
    """timestamp, input_length, output_length [rows], concatenated hash_ids, and the start of each row's ids.

    None unless every line is one object with exactly these keys, all of them integers.
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

    block = b"\n".join(lines)
    if block.count(b"{") != len(lines) or not all(line.startswith(b"{") for line in lines):
        return None
    fields = [(name, pa.int64()) for name in _KEYS[:3]] + [(_KEYS[3], pa.list_(pa.int64()))]
    parse = arrow_json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="error")
    read = arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        table = arrow_json.read_json(pa.BufferReader(block), read_options=read, parse_options=parse)
    except pa.ArrowException:
        return None
    arrays = [column.combine_chunks() for column in table.columns]
    if table.num_rows != len(lines) or any(array.null_count for array in (*arrays, arrays[3].values)):
        return None
    ids, starts = arrays[3].values.to_numpy(), arrays[3].offsets.to_numpy().astype(np.int64)
    times, prompts, outputs = (array.to_numpy() for array in arrays[:3])
    return times, prompts, outputs, ids, starts


def _valid_columns(columns: tuple[Ints, Ints, Ints, Ints, Ints], last_ns: int | None) -> bool:
    """Whether all rows pass the checks of a single row. Reading row by row then names the wrong one."""
    times, prompts, outputs, _, starts = columns
    floor_ms = 0 if last_ns is None else last_ns // _NS_PER_MS
    return bool(
        times[0] >= floor_ms
        and np.all(np.diff(times) >= 0)
        and prompts.min() >= 1
        and outputs.min() >= 0
        and max(times.max(), prompts.max(), outputs.max()) < 2**53
        and np.all(-(-prompts // BLOCK_TOKENS) == np.diff(starts))
    )


def block_ids(value: object, prompt_tokens: int) -> list[int]:
    """The ids of one row, one per full or partial block. Raises RowError."""
    ids = integers(value, "hash_ids")
    expected = -(-prompt_tokens // BLOCK_TOKENS)
    if len(ids) != expected:
        raise RowError(
            "hash_ids", f"ceil({prompt_tokens}/{BLOCK_TOKENS}) = {expected} ids expected, found {len(ids)}"
        )
    if len(set(ids)) != len(ids):
        twice = next(item for index, item in enumerate(ids) if item in ids[:index])
        raise RowError("hash_ids", f"id {twice} twice in one row: ids are not chained")
    return ids


def write_mooncake(trace: Trace, path: str | Path) -> None:
    """Write the fields that this format has; sessions and links are lost. Raises OSError."""
    names: dict[tuple[int, tuple[Piece, ...]], int] = {}
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for request in trace.requests:
            record = {
                "timestamp": request.arrival_us // 1000,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": _ids(request, names),
            }
            file.write(json.dumps(record) + "\n")


def _ids(request: TraceRequest, names: dict[tuple[int, tuple[Piece, ...]], int]) -> list[int]:
    """One id per full or partial block. Two ids are equal if and only if the prompts are equal up to its end."""
    ids: list[int] = []
    parent = -1
    for pieces in _blocks(request):
        unique = any(key is None for key, _, _ in pieces)
        name = (parent, (*pieces, (-1, request.request_id, 0)) if unique else pieces)
        parent = names.setdefault(name, len(names))
        ids.append(parent)
    return ids


def _blocks(request: TraceRequest) -> list[tuple[Piece, ...]]:
    blocks: list[list[Piece]] = []
    left = 0  # tokens that still fit into the last block
    for key, tokens in request.segments:
        start = 0
        while start < tokens:
            if not left:
                blocks.append([])
                left = BLOCK_TOKENS
            taken = min(left, tokens - start)
            blocks[-1].append((key, start, taken))
            start += taken
            left -= taken
    return [tuple(block) for block in blocks]
