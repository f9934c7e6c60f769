"""Names of blocks as small integers: two blocks have equal names where `KeyIdentity` gives them equal hashes.

A hash covers the pieces of segments in a block and the hash before it. So a block is known by the segments before the
one in which it ends, the key of that one, and its place; those that end in one segment have names in a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.compiled.state import NameArray
from harness.metrics.log import IntArray
from traces.analysis.reuse import keyed_levels
from traces.trace import SegmentColumns


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
        """Names for the blocks of prompts, each with its salt."""
        path = np.unique(np.array(salts, dtype=np.str_), return_inverse=True)[1]
        stop, distinct = np.zeros(len(path), np.int64), 0
        # of each run of names its prompt, its first name, how many they are
        runs = [np.zeros((3, 0), np.int64)]
        for live, pair, tokens in keyed_levels(prompts, path):
            before = stop[live] // block_size
            stop[live] += tokens
            counts = stop[live] // block_size - before
            most = np.zeros(int(pair.max()) + 1, np.int64)
            np.maximum.at(most, pair, counts)
            runs.append(np.stack([live, (distinct + np.cumsum(most) - most)[pair], counts]))
            distinct += int(most.sum())
        found = np.hstack(runs)
        _, first, counts = found[:, np.argsort(found[0], kind="stable")]
        ends = np.cumsum(counts)
        names = np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)
        return cls(np.concatenate([[0], np.cumsum(stop // block_size)]), names.astype(np.int32))
