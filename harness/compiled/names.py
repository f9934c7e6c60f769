"""Names of blocks as small integers: two blocks have equal names where `KeyIdentity` gives them equal hashes.

A hash covers the pieces of segments in a block and the hash before it. Here the chain of (name before, pieces) is
looked up in a dictionary instead. Blocks that lie in one segment come in runs, so that a shared prefix costs one
look-up.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from harness.compiled.state import NameArray
from harness.metrics.log import IntArray

Segments = Sequence[tuple[int | None, int]]
Piece = tuple[int, int, int]  # key, first token within the segment, tokens


class BlockNames(NamedTuple):
    """The names of request r are `names[first_name[r] : first_name[r + 1]]`, for its leading blocks that have one."""

    first_name: IntArray  # int64 [requests + 1]
    names: NameArray

    @classmethod
    def none(cls, requests: int) -> "BlockNames":
        """No block has a name."""
        return cls(np.zeros(requests + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))

    @classmethod
    def of(cls, requests: Iterable[tuple[Segments, str]], block_size: int) -> "BlockNames":
        """Names for requests given by their segments and salts, in order."""
        namer, names, first_name = _Namer(block_size), array("i"), array("q", [0])
        for segments, salt in requests:
            namer.name(segments, salt, names)
            first_name.append(len(names))
        return cls(np.frombuffer(first_name, dtype=np.int64), np.frombuffer(names, dtype=np.int32))


class _Namer:
    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._count = 0
        self._roots: dict[str, int] = {}
        self._mixed: dict[tuple[int, tuple[Piece, ...]], int] = {}  # blocks with pieces of several segments
        self._runs: dict[tuple[int, int, int], array[int]] = {}  # name before, key, first token of the run

    def name(self, segments: Segments, salt: str, names: "array[int]") -> None:
        """Append the names of the leading blocks that lie in segments with a key."""
        size = room = self._size
        before = self._roots.setdefault(salt, -1 - len(self._roots))
        pieces: tuple[Piece, ...] = ()
        for key, tokens in segments:
            if key is None:
                return
            start = 0
            if room < size:  # the block that an earlier segment began
                start = min(room, tokens)
                pieces, room = (*pieces, (key, 0, start)), room - start
                if room:
                    continue
                before = self._mixed_block(before, pieces)
                names.append(before)
            whole = (tokens - start) // size
            if whole:
                run = self._run(before, key, start, whole)
                names += run[:whole]
                before = run[whole - 1]
            rest = (tokens - start) % size
            pieces, room = ((key, tokens - rest, rest),) if rest else (), size - rest

    def _mixed_block(self, before: int, pieces: tuple[Piece, ...]) -> int:
        name = self._mixed.setdefault((before, pieces), self._count)
        self._count += name == self._count
        return name

    def _run(self, before: int, key: int, start: int, blocks: int) -> "array[int]":
        """At least `blocks` names of consecutive blocks of one segment."""
        run = self._runs.setdefault((before, key, start), array("i"))
        more = blocks - len(run)
        if more > 0:
            run.extend(range(self._count, self._count + more))
            self._count += more
        return run
