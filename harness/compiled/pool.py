"""The block pool: numbers of free, cached and held blocks. It does what `engine.core.memory.block_pool` does.

Which block a sequence gets changes no count. So only blocks that several requests may share have an identity, their
number; all others are counted. Cached blocks are evicted in the order of `EvictionList`: the table that was released
first, and from its end.
"""

from harness.compiled.numba_edge import jitable
from harness.compiled.state import (
    CACHED,
    EMPTY,
    ENTRIES,
    INTERNAL,
    SPARE,
    TAKEN,
    VOIDED,
    WRITTEN,
    ReplayState,
)
from harness.replay.arrivals import NEVER

# -- the order of eviction ---------------------------------------------------------------------------------------------


@jitable
def append_node(state: ReplayState, node: int) -> None:
    """Let `node` be evicted last."""
    after, before = state.evictable
    end = len(after) - 1
    last = before[end]
    after[last], before[node] = node, last
    after[node], before[end] = end, node


@jitable
def remove_node(state: ReplayState, node: int) -> None:
    """Take `node` out of the order."""
    after, before = state.evictable
    after[before[node]], before[after[node]] = after[node], before[node]


@jitable
def own_node(state: ReplayState, request: int) -> int:
    """The node of the blocks that only `request` can use."""
    return len(state.named.name) + request


@jitable
def evict(state: ReplayState, count: int) -> None:
    """Evict `count` blocks."""
    after, named = state.evictable.after, len(state.named.name)
    state.at[CACHED] -= count
    while count:
        node = after[len(after) - 1]
        gone = 1
        if node < named:
            forget_name(state, node)
        else:
            own = state.requests.own_cached
            gone = min(count, own[node - named])
            own[node - named] -= gone
        if node < named or not own[node - named]:
            remove_node(state, node)
        count -= gone


# -- names -------------------------------------------------------------------------------------------------------------


@jitable
def give_name(state: ReplayState, name: int) -> int:
    """A number for a block that is about to be filled, under `name`, with one reference."""
    blocks = state.named
    state.at[SPARE] -= 1
    block = blocks.spare[state.at[SPARE]]
    newest = blocks.newest[name]
    blocks.name[block], blocks.references[block] = name, 1
    blocks.older[block], blocks.newer[block] = newest, NEVER
    if newest == NEVER:
        blocks.oldest[name] = block
    else:
        blocks.newer[newest] = block
    blocks.newest[name] = block
    return int(block)


@jitable
def forget_name(state: ReplayState, block: int) -> None:
    """`block` has no name any more, and its number is free."""
    blocks = state.named
    name, older, newer = blocks.name[block], blocks.older[block], blocks.newer[block]
    if older == NEVER:
        blocks.oldest[name] = newer
    else:
        blocks.newer[older] = newer
    if newer == NEVER:
        blocks.newest[name] = older
    else:
        blocks.older[newer] = older
    blocks.spare[state.at[SPARE]] = block
    state.at[SPARE] += 1


@jitable
def names_of(state: ReplayState, request: int) -> int:
    """How many leading blocks of `request` others may share."""
    return int(state.inputs.first_name[request + 1] - state.inputs.first_name[request])


@jitable
def name_blocks(state: ReplayState, row: int, tokens: int) -> None:
    """Name the blocks of `row` that are full with its first `tokens` tokens."""
    request, batch = state.batch.request[row], state.batch
    full = min(tokens // state.rules.block_size, names_of(state, request))
    first = state.inputs.first_name[request]
    for place in range(first + batch.named[row], first + full):
        state.named.held[place] = give_name(state, state.inputs.names[place])
    batch.named[row] = max(batch.named[row], full)


# -- lookups -----------------------------------------------------------------------------------------------------------


@jitable
def named_hits(state: ReplayState, request: int, asked: int) -> int:
    """How many of the first `asked` blocks the cache has under their names."""
    first = state.inputs.first_name[request]
    names, oldest = state.inputs.names, state.named.oldest
    for place in range(first, first + min(asked, names_of(state, request))):
        if oldest[names[place]] == NEVER:
            return int(place - first)
    return min(asked, names_of(state, request))


@jitable
def own_hits(state: ReplayState, request: int, hits: int) -> int:
    """Cached blocks behind `hits` named ones that only `request` can use, because a preemption left them."""
    return int(state.requests.own_cached[request]) if hits == names_of(state, request) else 0


@jitable
def unused_hits(state: ReplayState, request: int, hits: int) -> int:
    """How many of the first `hits` named blocks no row refers to."""
    first, unused = state.inputs.first_name[request], 0
    for place in range(first, first + hits):
        unused += not state.named.references[state.named.oldest[state.inputs.names[place]]]
    return unused


@jitable
def share(state: ReplayState, row: int, hits: int, own: int) -> None:
    """Let the table of `row` begin with `hits` named blocks and `own` ones of its request."""
    request, blocks, revived = state.batch.request[row], state.named, own
    first = state.inputs.first_name[request]
    for place in range(first, first + hits):
        block = blocks.oldest[state.inputs.names[place]]
        if not blocks.references[block]:
            remove_node(state, block)
            revived += 1
        blocks.references[block] += 1
        blocks.held[place] = block
    if own:
        remove_node(state, own_node(state, request))
        state.requests.own_cached[request] = 0
    state.batch.named[row] = hits
    state.batch.blocks[row] = state.batch.distinct[row] = hits + own
    state.batch.computed[row] = (hits + own) * state.rules.block_size
    state.at[CACHED] -= revived
    state.at[ENTRIES] += hits + own
    state.at[WRITTEN] += revived * state.rules.block_size


# -- allocation --------------------------------------------------------------------------------------------------------


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
    """Give the only table of `row` `count` free blocks."""
    take_free(state, count)
    state.at[ENTRIES] += count
    state.batch.blocks[row] += count
    state.batch.distinct[row] += count
    note_last_blocks(state, row, 1)


@jitable
def take_free(state: ReplayState, count: int) -> None:
    """Take `count` free blocks: blocks without content first, then the least recently released."""
    at = state.at
    evicted = max(0, count - at[EMPTY])
    at[EMPTY] -= count - evicted
    if evicted:
        evict(state, evicted)
    at[VOIDED] += evicted
    at[TAKEN] += count


@jitable
def note_last_blocks(state: ReplayState, row: int, count: int) -> None:
    """`count` last blocks of tables of `row` came (or went, if negative): some of their slots may never be filled."""
    end = state.batch.blocks[row] * state.rules.block_size
    state.at[INTERNAL] += count * max(0, end - final_tokens(state, state.batch.request[row]))


@jitable
def give_back(state: ReplayState, count: int) -> None:
    """`count` blocks without reusable content are free again."""
    state.at[EMPTY] += count
    state.at[VOIDED] += count


@jitable
def release(state: ReplayState, row: int, kept: int) -> None:
    """Release all blocks of `row`. `kept` unnamed ones stay cached: only the request itself can come back for them.

    Where it has several branches, each has written into a last block of its own.
    """
    at, batch, size = state.at, state.batch, state.rules.block_size
    blocks, request, branches = batch.blocks[row], batch.request[row], batch.branches[row]
    unnamed = batch.distinct[row] - batch.named[row]
    if kept:
        state.requests.own_cached[request] = kept
        append_node(state, own_node(state, request))
        at[CACHED] += kept
    give_back(state, unnamed - kept)
    gone, last_is_gone = release_named(state, row)
    gone, last_is_gone = gone + unnamed, unnamed > 0 or last_is_gone
    at[ENTRIES] -= branches * blocks
    at[WRITTEN] -= gone * size - (branches * (blocks * size - batch.computed[row]) if last_is_gone else 0)
    note_last_blocks(state, row, -branches)


@jitable
def release_named(state: ReplayState, row: int) -> tuple[int, bool]:
    """Drop the references of `row`; returns how many blocks have none any more, and whether the last one has none."""
    at, named = state.at, state.named
    first, gone, last_is_gone = state.inputs.first_name[state.batch.request[row]], 0, False
    for index in range(state.batch.named[row] - 1, -1, -1):
        block = named.held[first + index]
        named.references[block] -= 1
        if named.references[block]:
            continue
        gone += 1
        last_is_gone = last_is_gone or index == state.batch.named[row] - 1
        if state.rules.keeps:
            append_node(state, block)
            at[CACHED] += 1
        else:
            forget_name(state, block)
            at[EMPTY] += 1
            at[VOIDED] += 1
    return gone, last_is_gone
