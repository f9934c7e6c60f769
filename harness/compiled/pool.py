"""The block pool: numbers of free, cached and held blocks. It does what `engine.core.memory.block_pool` does.

Which block a sequence gets changes no count. So only blocks that several requests may share have an identity, their
number; all others are counted. Cached blocks are evicted in the order of `EvictionList`: the table that was released
first, and from its end.
"""

from harness.compiled.lists import append_node, drop_run, names_of, new_run, remove_node, run_of, take_run
from harness.compiled.numba_edge import called, inlined
from harness.compiled.state import ENTRY, PIN, TTL, ReplayState
from harness.compiled.tiers import read, spill
from harness.replay.arrivals import NEVER

# -- the order of eviction ---------------------------------------------------------------------------------------------


@called
def keep_node(state: ReplayState, node: int, rank: int) -> None:
    """Let `node`, which is cached from now on, be evicted as the last of its rank."""
    if rank and state.rules.keep == TTL:
        state.evictable.since[node] = state.at[ENTRY.now]
    append_node(state.evictable, node, rank)


@called
def evict(state: ReplayState, count: int) -> None:
    """Evict `count` blocks."""
    after, runs, spills, victims = state.evictable.after, state.runs, state.tiers.spills, 0
    state.at[ENTRY.cached] -= count
    if state.rules.keep == TTL:
        expire(state)
    while count:
        end = len(after) - 1
        while after[end] == end:
            end -= 1
        node = after[end]
        gone, name, last = 1, NEVER, NEVER
        if node < runs.node:
            name = state.named.name[node]
            forget_name(state, node)
            remove_node(state.evictable, node)
        else:
            run = node - runs.node
            gone, name = min(count, runs.blocks[run]), runs.request[run]
            last = runs.first[run] + runs.blocks[run]
            runs.blocks[run] -= gone
            if not runs.blocks[run]:
                drop_run(runs, state.evictable, run)
        if spills:
            victim = state.tiers.victims[victims]
            victim[0], victim[1], victim[2] = name, last - gone, last
            victims += 1
        count -= gone
    if spills:
        spill(state.tiers, victims)


@called
def expire(state: ReplayState) -> None:
    """Blocks of sessions whose time is over fall to the lowest rank, behind what is there."""
    after, since = state.evictable.after, state.evictable.since
    kept = len(after) - 2
    while after[kept] != kept and state.at[ENTRY.now] - since[after[kept]] >= state.rules.keep_ns:
        node = after[kept]
        remove_node(state.evictable, node)
        append_node(state.evictable, node, 0)


@called
def rank_of(state: ReplayState, request: int, place: int) -> int:
    """The rank of block number `place` of `request`, which it leaves in the cache."""
    if state.rules.keep == PIN:
        return int(place < state.rules.pinned)
    return int(state.inputs.rank[request])


# -- cached blocks without a name --------------------------------------------------------------------------------------


@called
def add_run(state: ReplayState, request: int, first: int, blocks: int, is_found: bool, rank: int) -> None:
    """`blocks` blocks of a table of `request`, from number `first` on, are cached; `is_found`: it can find them."""
    state.at[ENTRY.cached] += blocks
    keep_node(state, new_run(state.runs, request if is_found else NEVER, first, blocks), rank)


# -- names -------------------------------------------------------------------------------------------------------------


@called
def give_name(state: ReplayState, name: int) -> int:
    """A number for a block that is about to be filled, under `name`, with one reference."""
    blocks = state.named
    state.at[ENTRY.spare] -= 1
    block = blocks.spare[state.at[ENTRY.spare]]
    newest = blocks.newest[name]
    blocks.name[block], blocks.references[block] = name, 1
    blocks.older[block], blocks.newer[block] = newest, NEVER
    if newest == NEVER:
        blocks.oldest[name] = block
    else:
        blocks.newer[newest] = block
    blocks.newest[name] = block
    return int(block)


@called
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
    blocks.spare[state.at[ENTRY.spare]] = block
    state.at[ENTRY.spare] += 1


@called
def name_blocks(state: ReplayState, row: int, tokens: int) -> None:
    """Name the blocks of `row` that are full with its first `tokens` tokens."""
    request, batch = state.batch.request[row], state.batch
    full = min(tokens // state.rules.block_size, names_of(state.inputs, request))
    first = state.inputs.first_name[request]
    for place in range(first + batch.named[row], first + full):
        state.named.held[place] = give_name(state, state.inputs.names[place])
    batch.named[row] = max(batch.named[row], full)


# -- lookups -----------------------------------------------------------------------------------------------------------


@called
def named_hits(state: ReplayState, request: int, asked: int) -> int:
    """How many of the first `asked` blocks the cache has under their names."""
    first = state.inputs.first_name[request]
    names, oldest = state.inputs.names, state.named.oldest
    for place in range(first, first + min(asked, names_of(state.inputs, request))):
        if oldest[names[place]] == NEVER:
            return int(place - first)
    return min(asked, names_of(state.inputs, request))


@called
def own_hits(state: ReplayState, request: int, hits: int, asked: int) -> int:
    """How many of the `asked` blocks, behind `hits` named ones, only `request` finds: preemptions left them."""
    return own_run(state, request, hits, asked) if hits >= names_of(state.inputs, request) else 0


@called
def own_run(state: ReplayState, owner: int, first: int, end: int) -> int:
    """How many blocks from number `first` to before `end` the runs of `owner` have without a gap."""
    runs, place = state.runs, first
    while place < end:
        run = run_of(runs, owner, place)
        if run == NEVER:
            break
        place = runs.first[run] + runs.blocks[run]
    return int(min(place, end) - first)


@called
def unused_hits(state: ReplayState, request: int, hits: int) -> int:
    """How many of the first `hits` named blocks no row refers to."""
    first, unused = state.inputs.first_name[request], 0
    for place in range(first, first + hits):
        unused += not state.named.references[state.named.oldest[state.inputs.names[place]]]
    return unused


@called
def share(state: ReplayState, row: int, hits: int, own: int) -> None:
    """Let the table of `row` begin with `hits` named blocks and `own` ones of its request."""
    request, blocks, revived = state.batch.request[row], state.named, own
    first = state.inputs.first_name[request]
    for place in range(first, first + hits):
        block = blocks.oldest[state.inputs.names[place]]
        if not blocks.references[block]:
            remove_node(state.evictable, block)
            revived += 1
        blocks.references[block] += 1
        blocks.held[place] = block
    take_run(state.runs, state.evictable, request, hits, hits + own)
    state.batch.named[row] = hits
    state.batch.blocks[row] = state.batch.distinct[row] = hits + own
    state.batch.computed[row] = (hits + own) * state.rules.block_size
    state.at[ENTRY.cached] -= revived
    state.at[ENTRY.entries] += hits + own
    state.at[ENTRY.written] += revived * state.rules.block_size


# -- allocation --------------------------------------------------------------------------------------------------------


@inlined
def free_blocks(state: ReplayState) -> int:
    """Blocks that no request holds, those with a reusable prefix included."""
    return int(state.at[ENTRY.empty] + state.at[ENTRY.cached])


@inlined
def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@inlined
def final_tokens(state: ReplayState, request: int) -> int:
    """Slots that the request may write; its last token is never computed, but drafts go on behind it."""
    return int(state.inputs.prompt[request] + state.inputs.output[request] - 1 + state.rules.drafts)


@called
def take(state: ReplayState, row: int, count: int) -> None:
    """Give the only table of `row` `count` free blocks."""
    take_free(state, count)
    state.at[ENTRY.entries] += count
    if state.rules.drafts:  # the last block before may be beyond the end, too
        note_last_blocks(state, row, -1)
    state.batch.blocks[row] += count
    state.batch.distinct[row] += count
    note_last_blocks(state, row, 1)


@called
def load(state: ReplayState, row: int, found: int, asked: int) -> None:
    """`row`, whose table begins with `found` blocks of the pool, reads what tiers have of the first `asked`."""
    loaded, size = read(state.tiers, state.batch.request[row], found, asked), state.rules.block_size
    if loaded:
        take(state, row, loaded)
        state.at[ENTRY.written] += loaded * size
        state.batch.computed[row] += loaded * size
        name_blocks(state, row, state.batch.computed[row])


@called
def take_free(state: ReplayState, count: int) -> None:
    """Take `count` free blocks: blocks without content first, then the least recently released."""
    at = state.at
    evicted = max(0, count - at[ENTRY.empty])
    at[ENTRY.empty] -= count - evicted
    if evicted:
        evict(state, evicted)
    at[ENTRY.voided] += evicted
    at[ENTRY.taken] += count


@inlined
def note_last_blocks(state: ReplayState, row: int, count: int) -> None:
    """`count` last blocks of tables of `row` came (or went, if negative): some of their slots may never be filled."""
    end = state.batch.blocks[row] * state.rules.block_size
    state.at[ENTRY.internal] += count * max(0, end - final_tokens(state, state.batch.request[row]))


@inlined
def give_back(state: ReplayState, count: int) -> None:
    """`count` blocks without reusable content are free again."""
    state.at[ENTRY.empty] += count
    state.at[ENTRY.voided] += count


@inlined
def branch_tokens(state: ReplayState, row: int, branch: int, more: int) -> int:
    """Computed tokens of a branch of `row`, once those that catch up have computed `more` tokens."""
    batch = state.batch
    if not batch.behind[row]:
        return int(batch.computed[row])
    again = batch.generated[row] - 1
    done = (batch.branches[row] - branch) * again - batch.behind[row] + more
    return int(batch.computed[row] + min(max(done, 0), again))


@called
def table_totals(state: ReplayState, row: int, more: int) -> tuple[int, int, int]:
    """Entries of the tables of `row`, slots of its blocks that are not written, and those that never will be; once
    branches that catch up have computed `more` tokens.
    """
    batch, size = state.batch, state.rules.block_size
    copies, final, end = batch.copies[row], final_tokens(state, batch.request[row]), batch.blocks[row] * size
    entries, unwritten, unfillable = 0, -copies * (end - batch.computed[row]), -copies * max(0, end - final)
    for branch in range(batch.branches[row]):
        tokens = branch_tokens(state, row, branch, more)
        if batch.behind[row]:
            end = blocks_of(tokens, size) * size
        entries += end // size
        unwritten += end - tokens
        unfillable += max(0, end - final)
    return entries, unwritten, unfillable


@called
def release(state: ReplayState, row: int, kept: int, is_found: bool) -> None:
    """Release all blocks of `row`. `kept` unnamed ones stay cached; `is_found`: the request may come back for them."""
    at, batch, size = state.at, state.batch, state.rules.block_size
    unnamed = batch.distinct[row] - batch.named[row]
    entries, unwritten, unfillable = table_totals(state, row, 0)
    request, first = batch.request[row], batch.named[row]
    near = min(kept, max(0, state.rules.pinned - first))  # in another rank than the rest
    if kept > near:
        add_run(state, request, first + near, kept - near, is_found, rank_of(state, request, first + near))
    if near:
        add_run(state, request, first, near, is_found, rank_of(state, request, first))
    give_back(state, unnamed - kept)
    gone, last_is_gone = release_named(state, row)
    gone, last_is_gone = gone + unnamed, unnamed > 0 or last_is_gone
    at[ENTRY.entries] -= entries
    at[ENTRY.written] -= gone * size - (unwritten if last_is_gone else 0)
    at[ENTRY.internal] -= unfillable


@called
def release_named(state: ReplayState, row: int) -> tuple[int, bool]:
    """Drop the references of `row`; returns how many blocks have none any more, and whether the last one has none."""
    at, named = state.at, state.named
    request, gone, last_is_gone = state.batch.request[row], 0, False
    first = state.inputs.first_name[request]
    for index in range(state.batch.named[row] - 1, -1, -1):
        block = named.held[first + index]
        named.references[block] -= 1
        if named.references[block]:
            continue
        gone += 1
        last_is_gone = last_is_gone or index == state.batch.named[row] - 1
        if state.rules.keeps:
            keep_node(state, block, rank_of(state, request, index))
            at[ENTRY.cached] += 1
        else:
            forget_name(state, block)
            at[ENTRY.empty] += 1
            at[ENTRY.voided] += 1
    return gone, last_is_gone
