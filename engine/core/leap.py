"""Fast-forward: how many identical decode steps the free blocks allow, and what they do to the pool."""

from itertools import islice
from typing import TYPE_CHECKING

from engine.core.calendar import DecodeCalendar
from engine.core.manager import LeapColumns
from engine.core.plan import SlotUsage

if TYPE_CHECKING:
    from engine.core.paged import PagedManager


def leap_limit(calendar: DecodeCalendar, steps: int, block_size: int, free_blocks: int) -> int:
    """The largest number of decode steps, at least 1 and at most `steps`, whose blocks are free.

    The first step is scheduled already. Every row takes one block in `block_size` steps, so whole rounds are counted
    at once and only the last one is walked.
    """
    rounds = min(free_blocks // max(1, calendar.rows), (steps - 1) // block_size)
    allowed, left = 1 + rounds * block_size, free_blocks - rounds * calendar.rows
    for need in islice(calendar.due_rows(), min(steps - allowed, block_size)):
        left -= need
        if left < 0:
            break
        allowed += 1
    return allowed


def leap_columns(
    manager: "PagedManager", calendar: DecodeCalendar, steps: int, first: SlotUsage
) -> LeapColumns:
    """Take the blocks of `steps` decode steps after the first, step by step and row by row as single steps would."""
    taken = []
    pool, books = manager.pool, manager.tables.books
    for step in range(1, steps):
        for group in calendar.due(step):
            cached, internal = pool.cached_blocks, books.internal
            count = manager.append(group)
            taken.append((step, count, cached - pool.cached_blocks, books.internal - internal))
    manager.advance((steps - 1) * calendar.rows)
    return LeapColumns.of(first, steps - 1, manager.block_size, taken)
