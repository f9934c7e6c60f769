"""Arithmetic of fast-forward: which rows cross a block boundary in which of several identical decode steps."""

from collections.abc import Sequence

from engine.core.plan import IntArray


def crossings(context: Sequence[int], steps: int, block_size: int) -> list[tuple[int, int]]:
    """Step and row of every block that decode steps 1 … `steps - 1` take, in the order single steps take them.

    `context` holds each row's context before step 0; step j writes position `context + j`, and takes a block where
    that is a multiple of the block size. Step 0 is not included: it has been scheduled already.
    """
    return sorted(
        (step, row)
        for row, tokens in enumerate(context)
        for step in range(-tokens % block_size or block_size, steps, block_size)
    )


def leap_limit(context: IntArray, steps: int, block_size: int, free_blocks: int) -> int:
    """The largest number of decode steps, at least 1 and at most `steps`, whose blocks are free.

    Step 0 is scheduled already; its successors take `floor((c + k - 1) / bs) - floor(c / bs)` blocks a row.
    """
    held = int((context // block_size).sum())

    def need(count: int) -> int:
        return int(((context + count - 1) // block_size).sum()) - held

    if need(steps) <= free_blocks:
        return steps
    low, high = 1, steps - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle) <= free_blocks else (low, middle - 1)
    return low
