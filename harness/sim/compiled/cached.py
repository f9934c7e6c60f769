"""Blocks that nobody holds and that still hold a prefix, as runs: one a released table, the oldest evicted first.

Of a run the tail goes first (`engine.core.memory.eviction.LruQueue`), and nobody but its owner can want it,
all of it: so a
run is a number of blocks.
"""

from harness.sim.compiled.compiling import part
from harness.sim.compiled.state import CACHED, NEVER, NEWEST, OLDEST, Run


@part
def keep(run: Run, owner: int, blocks: int) -> None:
    """`blocks` of a released table stay findable; `owner` is who may come back for them, or NEVER."""
    if not blocks:
        return
    if run.at[NEWEST] == len(run.cached.blocks):
        close_gaps(run)
    place = run.at[NEWEST]
    run.cached.owner[place], run.cached.blocks[place] = owner, blocks
    if owner != NEVER:
        run.lives.run[owner] = place
    run.at[NEWEST] += 1
    run.at[CACHED] += blocks


@part
def close_gaps(run: Run) -> None:
    """Move the runs that hold a block to the front: there are at most as many as blocks, or requests."""
    kept, (owner, blocks) = 0, run.cached
    for place in range(run.at[OLDEST], run.at[NEWEST]):
        if not blocks[place]:
            continue
        owner[kept], blocks[kept] = owner[place], blocks[place]
        if owner[kept] != NEVER:
            run.lives.run[owner[kept]] = kept
        kept += 1
    run.at[OLDEST], run.at[NEWEST] = 0, kept


@part
def evict(run: Run, count: int) -> None:
    """Give up so many blocks of the oldest runs."""
    owner, blocks = run.cached
    run.at[CACHED] -= count
    while count:
        place = run.at[OLDEST]
        gone = min(count, blocks[place])
        blocks[place] -= gone
        count -= gone
        if not blocks[place]:
            if owner[place] != NEVER:
                run.lives.run[owner[place]] = NEVER
            run.at[OLDEST] += 1


@part
def cached_blocks(run: Run, request: int) -> int:
    """Blocks of a preempted request that are still there."""
    place = run.lives.run[request]
    return 0 if place == NEVER else int(run.cached.blocks[place])


@part
def revive(run: Run, request: int) -> int:
    """The request comes back for its blocks; returns how many it finds."""
    found = cached_blocks(run, request)
    if found:
        place = run.lives.run[request]
        run.cached.owner[place], run.cached.blocks[place] = NEVER, 0
        run.lives.run[request] = NEVER
        run.at[CACHED] -= found
    return found
