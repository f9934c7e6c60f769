"""The block pool as numbers: how many blocks are free, cached or held, after `engine.core.memory.block_pool`.

Cached blocks are kept as runs, one for each released block table. The oldest run is evicted first.
"""

from harness.compiled.numba_edge import part
from harness.compiled.state import (
    CACHED,
    INTERNAL,
    NEVER,
    NEWEST,
    OLDEST,
    TAKEN,
    UNNAMED,
    VOIDED,
    WRITTEN,
    Run,
)


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


@part
def free_blocks(run: Run) -> int:
    """Blocks that nobody holds, those with a reusable prefix included."""
    return int(run.at[UNNAMED] + run.at[CACHED])


@part
def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@part
def final_tokens(run: Run, request: int) -> int:
    """Slots that the finished request has written: the last token is never fed back."""
    return int(run.lengths.prompt[request] + run.lengths.output[request] - 1)


@part
def take(run: Run, row: int, count: int) -> None:
    """Give `row` so many free blocks: those that hold nothing first, then the least recently released."""
    at, batch, size = run.at, run.batch, run.rules.block_size
    evicted = max(0, count - at[UNNAMED])
    at[UNNAMED] -= count - evicted
    if evicted:
        evict(run, evicted)
    at[VOIDED] += evicted
    at[TAKEN] += count
    batch.blocks[row] += count
    at[INTERNAL] += max(0, batch.blocks[row] * size - final_tokens(run, batch.request[row]))


@part
def release(run: Run, row: int, owner: int) -> None:
    """Take back all blocks of `row`; where full ones are kept, `owner` (NEVER: nobody) may come back for them."""
    at, batch, size = run.at, run.batch, run.rules.block_size
    blocks, computed = batch.blocks[row], batch.computed[row]
    kept = computed // size if run.rules.keeps else 0
    keep(run, owner, kept)
    at[UNNAMED] += blocks - kept
    at[VOIDED] += blocks - kept
    at[WRITTEN] -= computed
    at[INTERNAL] -= max(0, blocks * size - final_tokens(run, batch.request[row]))
