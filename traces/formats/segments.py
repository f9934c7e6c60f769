"""Segments from the block ids or token ids of a file.

`BlockSegments` holds the block ids of one prompt in an array, which needs an eighth of the memory of `Segment` values.
`ChainCheck` checks that ids are chained: each id has one parent and one position in the whole file. `TokenTree` takes
token ids and cuts them where two prompts differ, so the sharing is exact at any block size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from traces.errors import RowError
from traces.trace import Segment

_SEGMENT = partial(tuple.__new__, Segment)  # same as Segment(*pair), in a third of the time
_DENSE = 1 << 26  # ids below it are looked up in arrays, larger ones in a dictionary
_FIRST_SIZE = 1 << 16
Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]


class BlockSegments(Sequence[Segment]):
    """The segments of a prompt of `total` tokens: `keys` are its blocks of `block_tokens` tokens, in order.

    If the keys cover more than `total` tokens, the last block is shorter. If they cover less, the rest is unique to
    the request. Equal to the tuple of its segments.
    """

    __slots__ = ("_block", "_keys", "_total")

    def __init__(
        self, keys: npt.NDArray[np.int64] | npt.NDArray[np.uint64], block_tokens: int, total: int
    ) -> None:
        self._keys = keys
        self._block = block_tokens
        self._total = total

    def __iter__(self) -> Iterator[Segment]:
        keys: list[int] = self._keys.tolist()
        if not keys:
            return iter(self._rest(0))
        whole: Iterator[Segment] = map(_SEGMENT, zip(keys[:-1], repeat(self._block), strict=False))
        covered = (len(keys) - 1) * self._block
        last = min(self._block, self._total - covered)
        return chain(whole, (Segment(keys[-1], last),), self._rest(covered + last))

    def __len__(self) -> int:
        return len(self._keys) + (len(self._keys) * self._block < self._total)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Segment, ...]: ...
    def __getitem__(self, index: int | slice) -> Segment | tuple[Segment, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (tuple, BlockSegments)):
            return len(self) == len(other) and tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"BlockSegments({len(self._keys)} keys, {self._block} tokens each, {self._total} in all)"

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockSegments, (self._keys.copy(), self._block, self._total)

    def _rest(self, covered: int) -> tuple[Segment, ...]:
        return (Segment(None, self._total - covered),) if covered < self._total else ()


class ChainCheck:
    """Checks that ids are chained, from the parent, position and first line of every id seen.

    Nothing is remembered of a row or block that is refused.
    """

    def __init__(self, place: str = "line") -> None:
        self._place = place  # what `line` counts: lines or requests
        self._parents = np.zeros(_FIRST_SIZE, np.int64)  # parent id + 2; 1: no parent, 0: id not seen
        self._positions = np.zeros(_FIRST_SIZE, np.int32)
        self._lines = np.zeros(_FIRST_SIZE, np.int32)
        self._others: dict[int, tuple[int, int, int]] = {}  # the same for ids that are not dense

    def check_row(self, ids: list[int], line: int) -> None:
        """Check one row's ids and remember them. Raises RowError that names the line where the id was first seen."""
        fresh: dict[int, tuple[int, int, int]] = {}  # a row may have an id twice
        parent = -1
        for position, key in enumerate(ids):
            known = self._known(key) or fresh.get(key)
            if known is None:
                fresh[key] = parent, position, line
            elif known[1] != position:
                was = f"at position {position}, was at {known[1]} at {self._place} {known[2]}"
                raise RowError("hash_ids", f"id {key} {was}: ids are not chained")
            elif known[0] != parent:
                own, had = (("none" if name < 0 else str(name)) for name in (parent, known[0]))
                was = f"has parent {own}, had parent {had} at {self._place} {known[2]}"
                raise RowError("hash_ids", f"id {key} {was}: ids are not chained")
            parent = key
        for key, place in fresh.items():
            self._remember(key, *place)

    def check_block(self, ids: Ints, starts: Ints, first_line: int) -> bool:
        """Check concatenated rows (`starts` [rows + 1] into `ids`), and remember all of them or none.

        False if a row breaks the rule or repeats an id, or if an id is 2^26 or more. Then check each row alone.
        """
        if not ids.size or int(ids.max()) >= _DENSE or int(ids.min()) < 0:
            return not ids.size
        self._grow(int(ids.max()))
        lengths = np.diff(starts)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(ids.size) - starts[rows]
        parents = np.concatenate([[-1], ids[:-1]]) + 2
        parents[positions == 0] = 1
        _, index, inverse = np.unique(ids, return_index=True, return_inverse=True)
        first = index[inverse]  # for each place, the first place in the block with the same id
        expected = self._parents[ids], self._positions[ids]
        seen = expected[0] > 0
        agree = (expected[0] == parents) & (expected[1] == positions)
        same = (parents[first] == parents) & (positions[first] == positions)
        if not bool(np.all(np.where(seen, agree, same))):
            return False
        new = np.flatnonzero(~seen & (first == np.arange(ids.size)))
        self._parents[ids[new]] = parents[new]
        self._positions[ids[new]] = positions[new]
        self._lines[ids[new]] = first_line + rows[new]
        return True

    def _known(self, key: int) -> tuple[int, int, int] | None:
        if key >= _DENSE:
            return self._others.get(key)
        if key >= len(self._parents) or not self._parents[key]:
            return None
        return int(self._parents[key]) - 2, int(self._positions[key]), int(self._lines[key])

    def _remember(self, key: int, parent: int, position: int, line: int) -> None:
        if key >= _DENSE:
            self._others[key] = (parent, position, line)
            return
        self._grow(key)
        self._parents[key], self._positions[key], self._lines[key] = parent + 2, position, line

    def _grow(self, highest: int) -> None:
        size = len(self._parents)
        if highest < size:
            return
        while size <= highest:
            size *= 2
        for name in ("_parents", "_positions", "_lines"):
            old = getattr(self, name)
            larger = np.zeros(size, old.dtype)
            larger[: len(old)] = old
            setattr(self, name, larger)


@dataclass
class _Node:
    """An edge with its tokens and the edges after it. `uses` counts the sequences that contain it."""

    key: int
    tokens: Tokens
    uses: int = 0
    next: dict[int, "_Node"] = field(default_factory=dict)


class TokenTree:
    """A prefix tree of token sequences. Insert all sequences first: an insertion may cut a segment in two."""

    def __init__(self) -> None:
        self._root = _Node(-1, np.empty(0, np.int64))
        self._keys = 0

    def insert(self, tokens: Tokens, cuts: tuple[int, ...]) -> None:
        """Add a sequence. It is also cut at `cuts`: ascending positions, the last of which is its length."""
        start = 0
        node = self._root
        for cut in cuts:
            node = self._extend(node, tokens[start:cut])
            start = cut

    def segments(self, tokens: Tokens) -> tuple[Segment, ...]:
        """The segments of an inserted sequence, up to one of its cuts. Parts that no other sequence has get no key."""
        node, start, path = self._root, 0, []
        while start < len(tokens):
            node = node.next[int(tokens[start])]
            path.append(Segment(node.key if node.uses > 1 else None, len(node.tokens)))
            start += len(node.tokens)
        return tuple(path)

    def _extend(self, node: _Node, tokens: Tokens) -> _Node:
        """Walk or build the path of `tokens` from `node`. Returns its last node."""
        while tokens.size:
            child = node.next.get(int(tokens[0]))
            if child is None:
                child = node.next[int(tokens[0])] = self._node(tokens)
            length = min(len(child.tokens), len(tokens))
            different = np.flatnonzero(child.tokens[:length] != tokens[:length])
            common = int(different[0]) if different.size else length
            # cut the edge: its upper part keeps the node, the lower gets a new one
            if common < len(child.tokens):
                lower = self._node(child.tokens[common:])
                lower.uses, lower.next = child.uses, child.next
                child.tokens, child.next = child.tokens[:common], {int(lower.tokens[0]): lower}
            child.uses += 1
            node, tokens = child, tokens[common:]
        return node

    def _node(self, tokens: Tokens) -> _Node:
        self._keys += 1
        return _Node(self._keys - 1, tokens)
