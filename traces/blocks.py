"""Segments of equal length, kept as an array of keys: an eighth of the memory of as many `Segment` values."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from traces.trace import Segment

_SEGMENT = partial(tuple.__new__, Segment)  # as Segment(*pair), in a third of the time


class BlockSegments(Sequence[Segment]):
    """`keys` name blocks of `block_tokens` each, in order; equal to the tuple of segments that it stands for.

    Where the keys cover more than `total` tokens the last block is a shorter one; where they cover less, the rest is
    unique to the request.
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
