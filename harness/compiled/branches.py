"""Requests of several branches: forks, copies on write, and beams. It does what `engine.core.memory.paged` does.

All branches of a request have equally many tokens, and the full blocks of its prompt stay shared until it ends. So a
sampled request needs no tables, only counts. Beams share what they generated in a tree: each has a table of blocks
from the first that generated tokens are in, by numbers of its request, with reference counts. After a preemption the
branches fork from the prompt again and catch up, one after the other.
"""

from harness.compiled.drafts import ahead, below, seed_word
from harness.compiled.groups import lacking_pages, release_tables
from harness.compiled.numba_edge import called, inlined
from harness.compiled.pool import (
    blocks_of,
    branch_tokens,
    give_back,
    note_last_blocks,
    release,
    table_totals,
    take_free,
)
from harness.compiled.state import ENTRY, ReplayState
from harness.compiled.tiers import write_table
from harness.replay.arrivals import NEVER
from harness.replay.beams import EVEN
from harness.replay.branches import SCALE

_EVEN, _SCALE = float(EVEN), float(SCALE)


@inlined
def is_beam(state: ReplayState, row: int) -> bool:
    """Whether the request of `row` searches with beams."""
    return bool(state.inputs.beam[state.batch.request[row]])


@inlined
def first_own(state: ReplayState, row: int) -> int:
    """The index of the first block of a table that may hold generated tokens."""
    return int(state.inputs.prompt[state.batch.request[row]] // state.rules.block_size)


@inlined
def needed_blocks(state: ReplayState, row: int, query: int) -> int:
    """Blocks that `row` must take to compute `query` tokens in each of its branches, copies included."""
    batch = state.batch
    if state.rules.groups:
        return lacking_pages(state, row, query)
    if batch.behind[row]:
        added, copied = blocks_to_catch_up(state, row, query)
        return added + copied
    end = batch.computed[row] + query
    if state.rules.drafts:
        end += ahead(state, row, query)
    lacking = blocks_of(end, state.rules.block_size) - batch.blocks[row]
    return int(batch.branches[row] * lacking + batch.copies[row])


@called
def fork(state: ReplayState, row: int) -> None:
    """The prompt of `row` is computed. Its branches refer to the same blocks; all but one copy a partial last one."""
    batch = state.batch
    request = batch.request[row]
    width, partial = state.inputs.width[request], batch.computed[row] % state.rules.block_size > 0
    batch.branches[row] = width
    batch.copies[row] = (width - 1) * partial
    batch.behind[row] = width * (batch.generated[row] - 1)
    state.at[ENTRY.entries] += (width - 1) * batch.blocks[row]
    if not state.inputs.beam[request]:
        return
    state.at[ENTRY.slots] -= 1
    slot = state.beams.spare_slots[state.at[ENTRY.slots]]
    batch.slot[row] = slot
    beams = state.beams
    numbers = beams.references.shape[1]
    for number in range(numbers):
        beams.references[slot, number] = 0
        beams.spare[slot, number] = numbers - 1 - number
    beams.spares[slot] = numbers
    if partial:
        shared = new_number(state, slot, width)
        for branch in range(width):
            beams.tables[slot, branch, 0] = shared


@inlined
def new_number(state: ReplayState, slot: int, references: int) -> int:
    """A number for a block of the beams at `slot`."""
    beams = state.beams
    beams.spares[slot] -= 1
    number = beams.spare[slot, beams.spares[slot]]
    beams.references[slot, number] = references
    return int(number)


@inlined
def extend_branches(state: ReplayState, row: int) -> None:
    """Each branch of `row` computes one token: shared partial last blocks are copied, and new ones follow full ones."""
    at, batch, size = state.at, state.batch, state.rules.block_size
    branches, copies, computed = batch.branches[row], batch.copies[row], batch.computed[row]
    if batch.slot[row] != NEVER:
        extend_tables(state, row)
    if computed % size == 0:
        take_free(state, branches)
        at[ENTRY.entries] += branches
        batch.blocks[row] += 1
        batch.distinct[row] += branches
        note_last_blocks(state, row, branches)
    elif copies:
        take_free(state, copies)
        at[ENTRY.copies] += copies
        at[ENTRY.written] += copies * (computed % size)
        batch.distinct[row] += copies
        batch.copies[row] = 0
        note_last_blocks(state, row, copies)
    at[ENTRY.written] += branches


@called
def blocks_to_catch_up(state: ReplayState, row: int, query: int) -> tuple[int, int]:
    """Blocks that branches of `row` add to their tables to compute `query` tokens again, and copies of a last one.

    A branch that begins copies the partial last block of the prompt, but the last one to have it writes into it.
    """
    batch, size = state.batch, state.rules.block_size
    prompt, added, begun, left = batch.computed[row], 0, 0, 0
    for branch in range(batch.branches[row]):
        before = branch_tokens(state, row, branch, 0)
        after = branch_tokens(state, row, branch, query)
        added += blocks_of(after, size) - blocks_of(before, size)
        begun += before == prompt and after > prompt
        left += after == prompt
    return int(added), int(min(begun, begun + left - 1) if begun and prompt % size else 0)


@called
def catch_up(state: ReplayState, row: int, query: int) -> None:
    """Branches of `row` compute `query` tokens again."""
    at, batch, size = state.at, state.batch, state.rules.block_size
    entries, _, unfillable = table_totals(state, row, 0)
    added, copied = blocks_to_catch_up(state, row, query)
    take_free(state, added + copied)
    batch.distinct[row] += added + copied
    batch.copies[row] -= copied
    at[ENTRY.copies] += copied
    at[ENTRY.written] += query + copied * (batch.computed[row] % size)
    entries_then, _, unfillable_then = table_totals(state, row, query)
    at[ENTRY.entries] += entries_then - entries
    at[ENTRY.internal] += unfillable_then - unfillable
    slot, beams, own = batch.slot[row], state.beams, first_own(state, row)
    if slot == NEVER:
        return
    for branch in range(batch.branches[row]):
        before = branch_tokens(state, row, branch, 0)
        after = branch_tokens(state, row, branch, query)
        number = beams.tables[slot, branch, 0]
        if before == batch.computed[row] < after and before % size and beams.references[slot, number] > 1:
            beams.references[slot, number] -= 1
            beams.tables[slot, branch, 0] = new_number(state, slot, 1)
        for place in range(blocks_of(before, size) - own, blocks_of(after, size) - own):
            beams.tables[slot, branch, place] = new_number(state, slot, 1)


@inlined
def extend_tables(state: ReplayState, row: int) -> None:
    """The tables of beams that write one token each."""
    batch, beams, slot = state.batch, state.beams, state.batch.slot[row]
    place = batch.computed[row] // state.rules.block_size - first_own(state, row)
    is_new = batch.computed[row] % state.rules.block_size == 0
    for branch in range(batch.branches[row]):
        number = beams.tables[slot, branch, place]
        if is_new:
            beams.tables[slot, branch, place] = new_number(state, slot, 1)
        elif beams.references[slot, number] > 1:
            beams.references[slot, number] -= 1
            beams.tables[slot, branch, place] = new_number(state, slot, 1)


@inlined
def reparent(state: ReplayState, row: int) -> None:
    """Give every beam of `row` the blocks of its drawn parent, and drop the tables of beams without a child.

    A beam that goes on with itself keeps its table. Two tables that have the same block at one place have the same
    blocks before it, since both got them from one beam; so tables are compared from their ends.
    """
    at, batch, beams = state.at, state.batch, state.beams
    slot, size, width = batch.slot[row], state.rules.block_size, batch.branches[row]
    length = batch.blocks[row] - first_own(state, row)
    draw_parents(state, row)
    first = length
    for branch in range(width):
        beams.common[branch] = common_places(state, slot, branch, beams.parents[branch], length)
        first = min(first, beams.common[branch])
    for branch in range(width):
        for place in range(first, length):
            beams.before[branch, place] = beams.tables[slot, branch, place]
    dropped = 0
    for branch in range(width):
        for place in range(beams.common[branch], length):
            beams.tables[slot, branch, place] = beams.before[beams.parents[branch], place]
            beams.references[slot, beams.tables[slot, branch, place]] += 1
    gone = 0
    for branch in range(width):
        for place in range(beams.common[branch], length):
            number = beams.before[branch, place]
            beams.references[slot, number] -= 1
            if not beams.references[slot, number]:
                gone += 1
                beams.spare[slot, beams.spares[slot]] = number
                beams.spares[slot] += 1
                dropped += place == length - 1
    batch.distinct[row] -= gone
    give_back(state, gone)
    at[ENTRY.written] -= gone * size - dropped * (batch.blocks[row] * size - batch.computed[row])
    note_last_blocks(state, row, -dropped)
    batch.copies[row] = dropped if batch.computed[row] % size else 0


@inlined
def common_places(state: ReplayState, slot: int, one: int, other: int, length: int) -> int:
    """How many leading places of the tables of two beams hold the same blocks."""
    if one == other:
        return length
    tables = state.beams.tables
    for place in range(length, 0, -1):
        if tables[slot, one, place - 1] == tables[slot, other, place - 1]:
            return place
    return 0


@called
def release_row(state: ReplayState, row: int, is_found: bool, unseen: int) -> None:
    """Release all blocks of `row`, and its slot; `is_found`: its request may come back for what stays cached.

    Nobody has seen its last `unseen` tokens.
    """
    if state.rules.groups:
        release_tables(state, row, is_found)
    else:
        kept = kept_blocks(state, row, unseen)
        if state.tiers.chunk and not state.tiers.spills:
            write_table(state.tiers, state.batch.request[row], state.batch.named[row] + kept)
        release(state, row, kept if state.rules.keeps else 0, is_found or state.tiers.chunk > 0)
    if state.batch.slot[row] != NEVER:
        state.beams.spare_slots[state.at[ENTRY.slots]] = state.batch.slot[row]
        state.at[ENTRY.slots] += 1


@called
def kept_blocks(state: ReplayState, row: int, unseen: int) -> int:
    """Blocks without a name that are cached when `row` is released: full ones, but not those that beams generated.

    The last `unseen` tokens do not count.
    """
    batch, size = state.batch, state.rules.block_size
    if batch.branches[row] == 1:
        full = (batch.computed[row] - unseen) // size
        full = min(full, first_own(state, row)) if is_beam(state, row) else full
        return int(max(0, full - batch.named[row]))
    shared = first_own(state, row)
    kept = shared - batch.named[row]
    if not is_beam(state, row):
        for branch in range(batch.branches[row]):
            kept += (branch_tokens(state, row, branch, 0) - unseen) // size - shared
    return int(kept)


# -- parents -----------------------------------------------------------------------------------------------------------


@inlined
def draw_parents(state: ReplayState, row: int) -> None:
    """`BeamGenealogy.parents` of the token that `row` has just chosen, sorted, into `beams.parents`."""
    batch, beams = state.batch, state.beams
    request, width = batch.request[row], batch.branches[row]
    seed_word(state, request, batch.generated[row] - 1)
    mean, evenness = state.inputs.survivors[request], state.inputs.evenness[request]
    more = below(state, SCALE) < (mean - int(mean)) * _SCALE
    survivors = min(width, max(1, int(mean) + more))
    order, children = beams.order, beams.children
    for beam in range(width):
        order[beam], children[beam] = beam, 0
    further = width - survivors
    for place in range(further):
        other = place + below(state, width - place)
        order[place], order[other] = order[other], order[place]
    for place in range(further, width):
        children[order[place]] = 1
    for given in range(further):
        fresh = evenness * survivors
        if evenness >= _EVEN or not given or below(state, SCALE) < fresh / (fresh + given) * _SCALE:
            beams.given[given] = order[further + below(state, survivors)]
        else:
            beams.given[given] = beams.given[below(state, given)]
        children[beams.given[given]] += 1
    child = 0
    for beam in range(width):
        for _ in range(children[beam]):
            beams.parents[child] = beam
            child += 1
