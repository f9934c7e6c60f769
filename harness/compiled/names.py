"""Names of blocks as small integers: two blocks have equal names where `KeyIdentity` gives them equal hashes.

A hash covers the pieces of segments in a block and the hash before it. Here the chain of (name before, pieces) is
looked up in a dictionary instead. Blocks that lie in one segment come in runs, so that a shared prefix costs one
look-up.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.compiled.state import NameArray
from harness.metrics.log import IntArray
from traces.analysis.reuse import prompt_paths
from traces.trace import SegmentColumns

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
    def of(cls, prompts: SegmentColumns, salts: Sequence[str], block_size: int) -> "BlockNames":
        """Names for the blocks of prompts, each with its salt. Equal prompts are named once."""
        roots = np.unique(np.array(salts, dtype=np.str_), return_inverse=True)[1]
        _, one, which = np.unique(prompt_paths(prompts, roots)[1], return_index=True, return_inverse=True)
        namer, distinct = _Namer(block_size), prompts.take(one)
        named = [
            namer.named(segments, int(root))
            for segments, root in zip(distinct.rows(0, len(one)), roots[one], strict=True)
        ]
        counts = np.array([len(names) for names in named], dtype=np.int64)[which]
        first_name = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            first_name, np.concatenate([np.zeros(0, np.int32), *(named[place] for place in which.tolist())])
        )


class _Namer:
    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._count = 0
        self._mixed: dict[tuple[int, tuple[Piece, ...]], int] = {}  # blocks with pieces of several segments
        self._runs: dict[tuple[int, int, int], array[int]] = {}  # name before, key, first token of the run

    def named(self, segments: Segments, root: int) -> NameArray:
        """The names of the leading blocks that lie in segments with a key; prompts of other roots have others."""
        names, before = array("i"), -1 - root
        size = room = self._size
        pieces: tuple[Piece, ...] = ()
        for key, tokens in segments:
            if key is None:
                break
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
        return np.array(names, dtype=np.int32)

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
