"""Layers in several groups, each with a block table. It does what `engine.core.memory.paged` does for them.

All groups take equal pages from one pool, and their blocks are equally long. So the tables of a request are equally
long too, and only their beginnings differ: blocks that a window has left are released. Which blocks of a window stay
in the cache is a rule of their place alone (`engine.core.memory.eviction.CheckpointRule`), so it is not stored.
"""

from harness.compiled.lists import names_of, remove_node, run_of, take_run
from harness.compiled.numba_edge import called, inlined
from harness.compiled.pool import (
    add_run,
    blocks_of,
    final_tokens,
    forget_name,
    give_name,
    keep_node,
    own_run,
    take_free,
)
from harness.compiled.state import ENTRY, ReplayState
from harness.replay.arrivals import LATEST_NS, NEVER

_NO_WINDOW = LATEST_NS  # tokens after which a request without windows leaves a block behind

# -- what stays in the cache -------------------------------------------------------------------------------------------


@inlined
def is_kept(state: ReplayState, group: int, request: int, slot: int, index: int) -> bool:
    """Whether block `index` of a request enters the prefix cache of `group` when it is full."""
    needed, rules = state.layers.needed[group], state.rules
    if needed == NEVER:
        return True
    if rules.segment and (needed >= rules.segment or index % rules.segment >= rules.segment - needed):
        return True
    if rules.dense:
        return False
    last = (state.inputs.prompt[request] - 1) // rules.block_size
    junction = state.groups.junction[slot] // rules.block_size
    return bool(last - needed <= index < last or junction - needed <= index < junction)


@called
def name_pages(state: ReplayState, row: int, tokens: int) -> None:
    """Name the kept blocks of `row` that are full with its first `tokens` tokens of the prompt."""
    request, batch, groups = state.batch.request[row], state.batch, state.rules.groups
    full = min(
        min(tokens, state.inputs.prompt[request]) // state.rules.block_size, names_of(state.inputs, request)
    )
    first = state.inputs.first_name[request]
    for index in range(batch.named[row], full):
        for group in range(groups):
            place = (first + index) * groups + group
            state.named.held[place] = NEVER
            if is_kept(state, group, request, batch.slot[row], index):
                name = state.inputs.names[first + index] * groups + group
                state.named.held[place] = give_name(state, name)
                count_copy(state, group, name, 1)
    batch.named[row] = max(batch.named[row], full)


@inlined
def count_copy(state: ReplayState, group: int, name: int, more: int) -> None:
    """A block of `name` is in use from now on, or is no more if `more` is -1."""
    tables = state.groups
    if more > 0:
        tables.duplicates[group] += tables.copies[name] > 0
    tables.copies[name] += more
    if more < 0:
        tables.duplicates[group] -= tables.copies[name] > 0


# -- lookups -----------------------------------------------------------------------------------------------------------


@called
def leading(state: ReplayState, request: int, group: int, asked: int) -> int:
    """How many leading blocks of the `asked` ones the cache of `group` has."""
    named, groups = names_of(state.inputs, request), state.rules.groups
    first = state.inputs.first_name[request]
    for index in range(min(asked, named)):
        if state.named.oldest[state.inputs.names[first + index] * groups + group] == NEVER:
            return index
    if asked <= named:
        return asked
    return int(named + own_run(state, request * groups + group, named, asked))


@called
def has_block(state: ReplayState, request: int, group: int, index: int) -> bool:
    """Whether the cache of `group` has block `index` of `request`."""
    groups = state.rules.groups
    if index < names_of(state.inputs, request):
        name = state.inputs.names[state.inputs.first_name[request] + index]
        return bool(state.named.oldest[name * groups + group] != NEVER)
    return bool(run_of(state.runs, request * groups + group, index) != NEVER)


@called
def last_run(state: ReplayState, request: int, group: int, asked: int) -> int:
    """The longest prefix, at most `asked` blocks, before whose end the cache of `group` has what a hit needs."""
    end, index, needed = asked, asked - 1, state.layers.needed[group]
    while index >= max(0, end - needed):
        if not has_block(state, request, group, index):
            end = index
        index -= 1
    return int(end)


@called
def of_chunk(state: ReplayState, request: int, group: int, asked: int) -> int:
    """The longest prefix, at most `asked` blocks, that begins with the chunk of attention in which `asked` ends."""
    index = left_behind(state, group, asked * state.rules.block_size, asked)
    while index < asked and has_block(state, request, group, index):
        index += 1
    return int(index)


@called
def settled(state: ReplayState, request: int, asked: int, first_alone: bool) -> int:
    """The longest prefix of at most `asked` blocks for which every window (or the first alike) has what it needs."""
    found, before = asked, 0
    while found != before:
        before = found
        for group in range(state.rules.groups):
            if state.layers.whole[group] or (first_alone and not state.layers.like_first[group]):
                continue
            if state.layers.needed[group] == NEVER:
                found = of_chunk(state, request, group, found)
            else:
                found = last_run(state, request, group, found)
    return found


@called
def find_prefix(state: ReplayState, request: int, asked: int) -> tuple[int, int]:
    """The longest prefix of at most `asked` blocks that every group has, and that of the first groups alone."""
    found = longest = asked
    has_whole = False
    for group in range(state.rules.groups):
        if state.layers.whole[group]:
            has_whole = True
            found = leading(state, request, group, found)
            if state.layers.like_first[group]:
                longest = found
    if not has_whole:
        found = longest = settled(state, request, asked, True)
    return settled(state, request, found, False), longest


@called
def lacking_to_enter(state: ReplayState, request: int, hits: int, known: int, chunk_end: int) -> int:
    """Free pages that `request` needs beside its `hits`: for `known` tokens in the end, and for its first chunk."""
    lasting, at_once, unused = 0, 0, 0
    groups, size, first = state.rules.groups, state.rules.block_size, state.inputs.first_name[request]
    named = min(hits, names_of(state.inputs, request))
    for group in range(groups):
        lasting += max(0, most_blocks(state, group, known) - hits)
        at_once += max(0, blocks_of(chunk_end, size) - hits)
        held = left_behind(state, group, hits * size, hits)
        for index in range(held, named):
            block = state.named.oldest[state.inputs.names[first + index] * groups + group]
            unused += not state.named.references[block]
        unused += hits - max(held, named)
    return int(max(lasting, at_once) + unused)


@called
def most_blocks(state: ReplayState, group: int, tokens: int) -> int:
    """The most pages that a request of `tokens` tokens holds of `group` at once (`KVGroup.most_blocks`)."""
    window, chunk, size = state.layers.window[group], state.layers.chunk[group], state.rules.block_size
    whole = blocks_of(tokens, size)
    if chunk != NEVER:
        return min(whole, blocks_of(chunk + state.rules.budget, size))
    if window == NEVER:
        return whole
    return min(whole, blocks_of(window - 1 + state.rules.budget, size) + 1)


@inlined
def left_behind(state: ReplayState, group: int, computed: int, blocks: int) -> int:
    """Leading blocks, of `blocks`, that no token after the first `computed` sees in `group`."""
    window, chunk = state.layers.window[group], state.layers.chunk[group]
    if chunk != NEVER:
        return int(min(computed // chunk * chunk // state.rules.block_size, blocks))
    if window == NEVER or computed < window:
        return 0
    return int(min((computed - window + 1) // state.rules.block_size, blocks))


@called
def share_pages(state: ReplayState, row: int, hits: int, longest: int) -> None:
    """`row` gets a slot, and tables that begin with `hits` blocks of the cache."""
    at, batch, blocks, tables, groups = state.at, state.batch, state.named, state.groups, state.rules.groups
    request, size = batch.request[row], state.rules.block_size
    at[ENTRY.slots] -= 1
    slot = state.beams.spare_slots[at[ENTRY.slots]]
    first, named = state.inputs.first_name[request], min(hits, names_of(state.inputs, request))
    batch.slot[row], batch.named[row], batch.blocks[row] = slot, named, hits
    batch.computed[row] = hits * size
    tables.hits[slot], tables.due[slot] = hits, 0
    tables.junction[slot] = longest * size if longest > hits else 0
    for group in range(groups):
        held = left_behind(state, group, hits * size, hits)
        revived = hits - max(held, named)
        take_run(state.runs, state.evictable, request * groups + group, max(held, named), hits)
        for index in range(held, named):
            name = state.inputs.names[first + index] * groups + group
            block = blocks.oldest[name]
            if not blocks.references[block]:
                remove_node(state.evictable, block)
                count_copy(state, group, name, 1)
                revived += 1
            blocks.references[block] += 1
            blocks.held[(first + index) * groups + group] = block
        tables.held[slot, group] = held
        tables.live[group] += revived
        at[ENTRY.cached] -= revived
        at[ENTRY.entries] += hits - held
        at[ENTRY.written] += revived * size * state.layers.token_slots[group]


# -- growth ------------------------------------------------------------------------------------------------------------


@inlined
def lacking_pages(state: ReplayState, row: int, query: int) -> int:
    """Pages that `row` must take to compute `query` tokens. What its windows have left is released before."""
    batch = state.batch
    if batch.computed[row] >= state.groups.due[batch.slot[row]]:
        release_behind(state, row)
    lacking = blocks_of(batch.computed[row] + query, state.rules.block_size) - batch.blocks[row]
    return int(state.rules.groups * lacking)


@called
def extend_pages(state: ReplayState, row: int, query: int) -> None:
    """`row` computes `query` tokens in this step."""
    at, batch = state.at, state.batch
    lacking = lacking_pages(state, row, query)
    if lacking > 0:
        take_pages(state, row, lacking)
    name_pages(state, row, batch.computed[row] + query)
    at[ENTRY.written] += query * state.rules.token_slots


@called
def take_pages(state: ReplayState, row: int, lacking: int) -> None:
    """The tables of `row` get `lacking` pages together."""
    batch, groups = state.batch, state.rules.groups
    take_free(state, lacking)
    state.at[ENTRY.entries] += lacking
    batch.blocks[row] += lacking // groups
    for group in range(groups):
        state.groups.live[group] += lacking // groups
    state.at[ENTRY.internal] += unfillable(state, row) * state.rules.token_slots


@called
def unfillable(state: ReplayState, row: int) -> int:
    """Tokens of the last block of `row` that are never written."""
    end = state.batch.blocks[row] * state.rules.block_size
    return int(max(0, end - final_tokens(state, state.batch.request[row])))


@called
def release_behind(state: ReplayState, row: int) -> None:
    """Release the blocks of `row` that its windows have left."""
    batch, tables, size = state.batch, state.groups, state.rules.block_size
    slot, due = batch.slot[row], _NO_WINDOW
    for group in range(state.rules.groups):
        window, chunk = state.layers.window[group], state.layers.chunk[group]
        if window == NEVER and chunk == NEVER:
            continue
        held = tables.held[slot, group]
        left = left_behind(state, group, batch.computed[row], batch.blocks[row])
        if left > held:
            release_pages(state, row, group, held, left, True)
            tables.held[slot, group] = left
        held = max(held, left)
        due = min(
            due, (held + 1) * size + window - 1 if chunk == NEVER else (held * size // chunk + 1) * chunk
        )
    tables.due[slot] = due


@called
def release_tables(state: ReplayState, row: int, is_found: bool) -> None:
    """Release all blocks of `row`; `is_found`: its request may come back for them."""
    batch, slot = state.batch, state.batch.slot[row]
    for group in range(state.rules.groups):
        release_pages(state, row, group, state.groups.held[slot, group], batch.blocks[row], is_found)
    unwritten = batch.blocks[row] * state.rules.block_size - batch.computed[row]
    state.at[ENTRY.written] += unwritten * state.rules.token_slots
    state.at[ENTRY.internal] -= unfillable(state, row) * state.rules.token_slots


@called
def release_pages(state: ReplayState, row: int, group: int, first: int, end: int, is_found: bool) -> None:
    """Drop the references of `row` to blocks `first` to `end - 1` of `group`; cached ones go from their end."""
    at, batch, named, groups = state.at, state.batch, state.named, state.rules.groups
    request, slot, size = batch.request[row], batch.slot[row], state.rules.block_size
    full, names = batch.computed[row] // size, state.inputs.first_name[request]
    owner, run_end, gone, void = request * groups + group, NEVER, 0, 0
    for index in range(end - 1, first - 1, -1):
        block = named.held[(names + index) * groups + group] if index < batch.named[row] else NEVER
        is_own = (
            block == NEVER and state.rules.keeps and index >= names_of(state.inputs, request) and index < full
        )
        if is_own and (index < state.groups.hits[slot] or is_kept(state, group, request, slot, index)):
            run_end = index + 1 if run_end == NEVER else run_end
            gone += 1
            continue
        if run_end != NEVER:
            add_run(state, owner, index + 1, run_end - index - 1, is_found, 0)
            run_end = NEVER
        if block == NEVER:
            gone, void = gone + 1, void + 1
            continue
        named.references[block] -= 1
        if named.references[block]:
            continue
        gone += 1
        count_copy(state, group, named.name[block], -1)
        if state.rules.keeps:
            keep_node(state, block, 0)
            at[ENTRY.cached] += 1
        else:
            forget_name(state, block)
            void += 1
    if run_end != NEVER:
        add_run(state, owner, first, run_end - first, is_found, 0)
    at[ENTRY.empty] += void
    at[ENTRY.voided] += void
    at[ENTRY.entries] -= end - first
    at[ENTRY.written] -= gone * size * state.layers.token_slots[group]
    state.groups.live[group] -= gone


# -- what a step tells -------------------------------------------------------------------------------------------------


@called
def lost_slots(state: ReplayState) -> int:
    """Slots of the pages in use that no token can fill."""
    lost = 0
    for group in range(state.rules.groups):
        lost += state.groups.live[group] * state.layers.lost_slots[group]
    return int(lost)


@called
def log_waste(state: ReplayState) -> None:
    """Log what the pages in use hold of no use, while the step runs."""
    waste, tables = state.log.waste[state.at[ENTRY.steps]], state.groups
    for group in range(state.rules.groups):
        waste[group, 0] = 0
        if state.layers.window[group] != NEVER:
            waste[group, 0] = behind_windows(state, group)
        waste[group, 1], waste[group, 2] = tables.duplicates[group], tables.live[group]


@inlined
def behind_windows(state: ReplayState, group: int) -> int:
    """Tokens that no request sees any more, in the blocks where windows begin (`GroupAccount._behind_tokens`)."""
    tables, named, behind = state.groups, state.named, 0
    for row in range(state.at[ENTRY.running]):
        block, left = first_seen(state, group, row)
        if left and block == NEVER:
            behind += left
        elif left:
            tables.least[block] = min(tables.least[block], left) if tables.seen[block] else left
            tables.seen[block] += 1
    for row in range(state.at[ENTRY.running]):
        block, left = first_seen(state, group, row)
        if left and block != NEVER and tables.seen[block]:
            if tables.seen[block] == named.references[block] and is_first_live(state, block):
                behind += tables.least[block]
            tables.seen[block] = 0
    return int(behind)


@inlined
def first_seen(state: ReplayState, group: int, row: int) -> tuple[int, int]:
    """The block where the window of `row` begins, NEVER if it has no name, and the tokens in it that are not seen."""
    batch, size = state.batch, state.rules.block_size
    request, held = batch.request[row], state.groups.held[batch.slot[row], group]
    left = batch.computed[row] - state.layers.window[group] + 1 - held * size
    if held >= batch.blocks[row] or left <= 0:
        return NEVER, 0
    block = NEVER
    if held < batch.named[row]:
        block = state.named.held[(state.inputs.first_name[request] + held) * state.rules.groups + group]
    return int(block), int(min(left, size))


@inlined
def is_first_live(state: ReplayState, block: int) -> bool:
    """Whether no older block of the same name is in use."""
    older = state.named.older[block]
    while older != NEVER:
        if state.named.references[older]:
            return False
        older = state.named.older[older]
    return True
