"""The block pool as numbers of free, cached and held blocks. It does what `engine.core.memory.block_pool` does.

Cached blocks have one entry for each released block table. The oldest entry is evicted first.
"""

from harness.compiled.numba_edge import jitable
from harness.compiled.state import (
    CACHED,
    EMPTY,
    INTERNAL,
    NEVER,
    NEWEST,
    OLDEST,
    TAKEN,
    VOIDED,
    WRITTEN,
    ReplayState,
)


@jitable
def keep(state: ReplayState, owner: int, blocks: int) -> None:
    """Keep `blocks` blocks of a released table cached; `owner` is the request that may come back for them, or NEVER."""
    if not blocks:
        return
    if state.at[NEWEST] == len(state.cached.blocks):
        close_gaps(state)
    place = state.at[NEWEST]
    state.cached.owner[place], state.cached.blocks[place] = owner, blocks
    if owner != NEVER:
        state.requests.cached_entry[owner] = place
    state.at[NEWEST] += 1
    state.at[CACHED] += blocks


@jitable
def close_gaps(state: ReplayState) -> None:
    """Move the entries that hold a block to the front; there are at most as many as blocks, or as requests."""
    kept, (owner, blocks) = 0, state.cached
    for place in range(state.at[OLDEST], state.at[NEWEST]):
        if not blocks[place]:
            continue
        owner[kept], blocks[kept] = owner[place], blocks[place]
        if owner[kept] != NEVER:
            state.requests.cached_entry[owner[kept]] = kept
        kept += 1
    state.at[OLDEST], state.at[NEWEST] = 0, kept


@jitable
def evict(state: ReplayState, count: int) -> None:
    """Evict `count` blocks, from the oldest entries first."""
    owner, blocks = state.cached
    state.at[CACHED] -= count
    while count:
        place = state.at[OLDEST]
        gone = min(count, blocks[place])
        blocks[place] -= gone
        count -= gone
        if not blocks[place]:
            if owner[place] != NEVER:
                state.requests.cached_entry[owner[place]] = NEVER
            state.at[OLDEST] += 1


@jitable
def cached_blocks(state: ReplayState, request: int) -> int:
    """Blocks of a preempted request that are still cached."""
    place = state.requests.cached_entry[request]
    return 0 if place == NEVER else int(state.cached.blocks[place])


@jitable
def revive(state: ReplayState, request: int) -> int:
    """Give a preempted request its cached blocks back; returns how many there are."""
    found = cached_blocks(state, request)
    if found:
        place = state.requests.cached_entry[request]
        state.cached.owner[place], state.cached.blocks[place] = NEVER, 0
        state.requests.cached_entry[request] = NEVER
        state.at[CACHED] -= found
    return found


@jitable
def free_blocks(state: ReplayState) -> int:
    """Blocks that no request holds, those with a reusable prefix included."""
    return int(state.at[EMPTY] + state.at[CACHED])


@jitable
def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@jitable
def final_tokens(state: ReplayState, request: int) -> int:
    """Slots that the request has written when it ends; its last token is never computed."""
    return int(state.inputs.prompt[request] + state.inputs.output[request] - 1)


@jitable
def take(state: ReplayState, row: int, count: int) -> None:
    """Give `row` `count` free blocks: blocks without content first, then the least recently released."""
    at, batch, size = state.at, state.batch, state.rules.block_size
    evicted = max(0, count - at[EMPTY])
    at[EMPTY] -= count - evicted
    if evicted:
        evict(state, evicted)
    at[VOIDED] += evicted
    at[TAKEN] += count
    batch.blocks[row] += count
    at[INTERNAL] += max(0, batch.blocks[row] * size - final_tokens(state, batch.request[row]))


@jitable
def release(state: ReplayState, row: int, owner: int) -> None:
    """Release all blocks of `row`; where full ones stay cached, `owner` (NEVER: none) may come back for them."""
    at, batch, size = state.at, state.batch, state.rules.block_size
    blocks, computed = batch.blocks[row], batch.computed[row]
    kept = computed // size if state.rules.keeps else 0
    keep(state, owner, kept)
    at[EMPTY] += blocks - kept
    at[VOIDED] += blocks - kept
    at[WRITTEN] -= computed
    at[INTERNAL] -= max(0, blocks * size - final_tokens(state, batch.request[row]))
