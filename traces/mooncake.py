"""Mooncake JSONL: arrivals in ms, lengths, and chained ids of 512-token blocks. The common exchange form.

The partial last block has an id of its own, so reuse is understated by up to one block a turn; the arrivals of the
conversation trace stand on ticks of 3 s with a few ms of jitter.
"""

from itertools import repeat
from math import gcd

from traces.errors import RowError
from traces.jsonl import integer, kind, read_object, require_keys
from traces.rows import Row, in_range, note
from traces.trace import CHAINED, Segment

BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_NS_PER_MS = 1_000_000
_JITTER_MS = 10  # ticks are looked for after rounding to it: the published jitter is 3 ms
_SHORTEST_TICK_MS = 1_000
_FEWEST_TICKS = 4  # by chance (10 ms / 1 s)^4 at most, so that a few round times are not taken for ticks


class MooncakeReader:
    """Rows of a Mooncake trace; `accept` checks that ids are chained."""

    format = "mooncake"
    key_kind = CHAINED
    source_block_tokens: int | None = BLOCK_TOKENS
    time_field = "timestamp"
    has_header = False

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}
        self._places: dict[int, tuple[int | None, int, int]] = {}  # id -> (parent, position, line)

    def read_header(self, text: str) -> None:
        """Never called: JSONL has no header."""

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds from the start of the recording; segments of 512 tokens and the rest."""
        record = read_object(text)
        require_keys(record, _KEYS)
        time_ms = in_range(integer(record, "timestamp", "milliseconds"), "timestamp", 0)
        prompt = in_range(integer(record, "input_length"), "input_length", 1)
        output = in_range(integer(record, "output_length"), "output_length", 0)
        ids = _block_ids(record["hash_ids"], prompt)
        if len(record) > len(_KEYS):
            for key in record.keys() - _KEYS:
                note(self.noted, f"unknown key {key}")
        return Row(time_ms * _NS_PER_MS, prompt, output, _segments(ids, prompt))

    def accept(self, row: Row, line: int) -> None:
        """Every id keeps one parent and one position over the whole file."""
        places, fresh = self._places, []
        parent: int | None = None
        for position, (key, _) in enumerate(row.segments):
            assert key is not None  # every block of this format has an id
            place = places.get(key)
            if place is None:
                fresh.append((key, (parent, position, line)))
            elif place[1] != position:
                raise _unchained(f"id {key} at position {position}, was at {place[1]} at line {place[2]}")
            elif place[0] != parent:
                raise _unchained(f"id {key} has parent {parent}, had parent {place[0]} at line {place[2]}")
            parent = key
        places.update(fresh)

    def clock_quantum_us(self, times_ns: list[int]) -> int:
        """The tick on which all arrivals stand, jitter aside; one millisecond where there is none."""
        rounded = {(time + _JITTER_MS * _NS_PER_MS // 2) // (_JITTER_MS * _NS_PER_MS) for time in times_ns}
        tick_ms = gcd(*rounded) * _JITTER_MS
        enough = len(rounded - {0}) >= _FEWEST_TICKS
        return tick_ms * 1_000 if enough and tick_ms >= _SHORTEST_TICK_MS else 1_000


def _block_ids(value: object, prompt_tokens: int) -> list[int]:
    if not isinstance(value, list):
        raise RowError("hash_ids", f"list expected, found {kind(value)}")
    if set(map(type, value)) - {int}:
        index, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise RowError(f"hash_ids[{index}]", f"integer expected, found {kind(item)}")
    expected = -(-prompt_tokens // BLOCK_TOKENS)
    _check_range(value)
    if len(value) != expected:
        raise RowError(
            "hash_ids", f"ceil({prompt_tokens}/{BLOCK_TOKENS}) = {expected} ids expected, found {len(value)}"
        )
    if len(set(value)) != len(value):
        twice = next(item for index, item in enumerate(value) if item in value[:index])
        raise RowError("hash_ids", f"id {twice} twice in one row: ids are not chained")
    return value


def _check_range(ids: list[int]) -> None:
    if ids and (min(ids) < 0 or max(ids) >= 2**63):
        index, item = next((i, item) for i, item in enumerate(ids) if not 0 <= item < 2**63)
        reason = "is below 0" if item < 0 else "does not fit 64 bits (63 without sign)"
        raise RowError(f"hash_ids[{index}]", f"{item} {reason}")


def _segments(ids: list[int], prompt_tokens: int) -> tuple[Segment, ...]:
    whole = map(Segment, ids[:-1], repeat(BLOCK_TOKENS))
    return (*whole, Segment(ids[-1], prompt_tokens - (len(ids) - 1) * BLOCK_TOKENS))


def _unchained(reason: str) -> RowError:
    return RowError("hash_ids", f"{reason}: ids are not chained")
