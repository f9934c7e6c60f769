"""Arithmetic of fast-forward: which rows cross a block boundary in which of several identical decode steps."""

import numpy as np

from engine.core.plan import IntArray


def crossings(context: IntArray, steps: int, block_size: int) -> tuple[IntArray, IntArray]:
    """Step and row of every block that decode steps 1 … `steps - 1` take, in the order single steps take them.

    `context` holds each row's context before step 0; step j writes position `context + j`, and takes a block where
    that is a multiple of the block size. Step 0 is not included: it has been scheduled already.
    """
    first = -context % block_size
    first = np.where(first == 0, block_size, first)
    counts = np.maximum(0, -(-(steps - first) // block_size))
    rows = np.repeat(np.arange(len(context)), counts)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    at = first[rows] + nth * block_size
    order = np.lexsort((rows, at))
    return at[order], rows[order]


def leap_limit(context: IntArray, steps: int, block_size: int, free_blocks: int) -> int:
    """The largest number of decode steps, at least 1 and at most `steps`, whose blocks are free.

    Step 0 is scheduled already; its successors take `floor((c + k - 1) / bs) - floor(c / bs)` blocks a row.
    """
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        need = int(((context + middle - 1) // block_size - context // block_size).sum())
        low, high = (middle, high) if need <= free_blocks else (low, middle - 1)
    return low
