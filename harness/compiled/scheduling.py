"""Scheduling of a step: query tokens, preemption, arrivals and admission.

It does what `engine.core.scheduling.scheduler` does, for requests that are rows of lengths.
"""

from harness.compiled.arriving import first_waiting, pop, push, put_back, take_first
from harness.compiled.branches import catch_up, extend_branches, needed_blocks, release_row
from harness.compiled.drafts import drafts_of, is_padded, note_drafts, within
from harness.compiled.groups import extend_pages, find_prefix, lacking_to_enter, share_pages
from harness.compiled.numba_edge import called, inlined
from harness.compiled.pool import (
    blocks_of,
    branch_tokens,
    free_blocks,
    load,
    name_blocks,
    named_hits,
    own_hits,
    share,
    take,
    unused_hits,
)
from harness.compiled.state import ENTRY, ReplayState, members
from harness.compiled.tiers import loadable
from harness.replay.arrivals import NEVER


@inlined
def lacking_tokens(state: ReplayState, row: int) -> int:
    """Tokens of `row` to compute before it samples, forks, or has caught up."""
    batch = state.batch
    if batch.behind[row]:
        return int(batch.behind[row])
    request = batch.request[row]
    lacking = state.inputs.prompt[request] - batch.computed[row]
    # else the prompt comes first, also after a preemption
    if batch.branches[row] == state.inputs.width[request]:
        lacking += batch.generated[row]
    return int(lacking)


@inlined
def samples(state: ReplayState, row: int) -> bool:
    """Whether the step under way gives each branch of `row` a token."""
    batch = state.batch
    if not batch.query[row] or batch.behind[row] or batch.query[row] < lacking_tokens(state, row):
        return False
    resumes = batch.generated[row] and batch.branches[row] != state.inputs.width[batch.request[row]]
    return not resumes


@called
def asked_blocks(state: ReplayState, request: int) -> int:
    """How many blocks of `request` are looked up: one token is left to compute before it samples or forks."""
    known = state.requests.generated[request] if state.inputs.width[request] == 1 else 0
    return int((state.inputs.prompt[request] + known - 1) // state.rules.block_size)


@called
def prefill_cap(state: ReplayState) -> int:
    """The largest chunk of one prompt: a lone request gets the whole budget."""
    at, rules = state.at, state.rules
    requests = at[ENTRY.running] + at[ENTRY.ending] + at[ENTRY.tail] - at[ENTRY.head]
    if requests <= 1 or not rules.prefill_cap:
        return rules.budget
    return int(max(rules.prefill_cap, rules.budget // requests) if rules.adaptive else rules.prefill_cap)


@inlined
def fill(state: ReplayState) -> None:
    """Continue running requests and admit others; or prompts alone, where steps are not mixed.

    Requests come back from host memory first: none is admitted while one is still there.
    """
    at = state.at
    if not state.rules.mixed and fill_with_prompts(state):
        return
    continue_running(state)
    while at[ENTRY.budget] > 0 and at[ENTRY.swapped] and not at[ENTRY.preempted] and may_return(state):
        swap_in(state)
    if state.rules.mixed and not at[ENTRY.swapped] and not at[ENTRY.preempted]:
        admit(state)


@inlined
def continue_running(state: ReplayState) -> None:
    """Give every row its query tokens and blocks, in order of admission; what is left of the budget is in `BUDGET`.

    Steady rows, which only decode, always run. Where blocks are short, other rows are preempted.
    """
    at, branches, query = state.at, state.batch.branches, state.batch.query
    row = 0
    while row < at[ENTRY.steady]:
        if has_room(state, row):
            query[row] = 1
            at[ENTRY.written] += branches[row] * state.rules.token_slots
            row += 1
        else:
            row = extend_or_preempt(state, row, 1)
    at[ENTRY.budget], cap = state.rules.budget - at[ENTRY.steady_rows], prefill_cap(state)
    while row < at[ENTRY.running]:
        tokens = query_tokens(state, row, cap)
        query[row] = 0
        together = branches[row] > 1 and not state.batch.behind[row]  # they sample together or not at all
        if tokens <= 0 or (together and branches[row] > at[ENTRY.budget]):
            row += 1
            continue
        row = extend_or_preempt(state, row, tokens)
    at[ENTRY.budget] = max(at[ENTRY.budget], 0)


@called
def fill_with_prompts(state: ReplayState) -> bool:
    """Where steps are not mixed: continue prompts and admit requests; whether the step has rows of them."""
    at, batch = state.at, state.batch
    at[ENTRY.budget], cap, row = state.rules.budget, prefill_cap(state), at[ENTRY.steady]
    for other in range(at[ENTRY.running]):
        batch.query[other] = 0
    while row < at[ENTRY.running]:
        tokens = query_tokens(state, row, cap)
        if tokens <= 0 or decodes(state, row):
            row += 1
            continue
        row = extend_or_preempt(state, row, tokens)
    at[ENTRY.budget] = max(at[ENTRY.budget], 0)
    if not at[ENTRY.preempted] and not at[ENTRY.swapped]:
        admit(state)
    return has_rows(state)


@inlined
def decodes(state: ReplayState, row: int) -> bool:
    """Whether each branch of `row` has all its known tokens but the last one (`Group.decodes`).

    One that has not forked again since it was preempted may lack one token of its prompt.
    """
    batch = state.batch
    forked = batch.branches[row] == state.inputs.width[batch.request[row]]
    return bool(forked and batch.generated[row] and not batch.behind[row] and lacking_tokens(state, row) == 1)


@inlined
def has_room(state: ReplayState, row: int) -> bool:
    """Whether the next token of steady `row` goes into blocks that it has, and its windows leave none: then nothing of
    the pool changes but the count of written slots.
    """
    batch = state.batch
    if batch.computed[row] % state.rules.block_size == 0:
        return False
    return bool(not state.rules.groups or batch.computed[row] < state.groups.due[batch.slot[row]])


@called
def extend_or_preempt(state: ReplayState, row: int, query: int) -> int:
    """`row` computes `query` tokens in this step; other rows or itself are preempted where blocks are short.

    Returns the row that comes next.
    """
    at, is_steady = state.at, row < state.at[ENTRY.steady]
    needed = needed_blocks(state, row, query)
    while needed > free_blocks(state):
        if at[ENTRY.ending] and preempt_ended(state, row):
            continue
        victim = last_in_queue(state, row) if state.rules.by_priority else at[ENTRY.running] - 1
        if victim < row and state.batch.query[victim]:
            take_back(state, victim)
        preempt(state, victim)
        if victim == row:
            return row
        row -= victim < row
    extend(state, row, query)
    if not is_steady:
        at[ENTRY.budget] -= query if state.batch.behind[row] else query * state.batch.branches[row]
        at[ENTRY.budget] -= state.rules.drafts > 0
    return row + 1


@called
def preempt_ended(state: ReplayState, row: int) -> bool:
    """Preempt a request that has ended, if it is the one to preempt: it loses its blocks."""
    at, batch = state.at, state.batch
    first, last = state.rules.max_rows, state.rules.max_rows
    for other in range(first + 1, first + at[ENTRY.ending]):
        if comes_later(state, other, last):
            last = other
    running = last_in_queue(state, row) if state.rules.by_priority else at[ENTRY.running] - 1
    if not comes_later(state, last, running):
        return False
    release_ended(state, last, at[ENTRY.under_way] * batch.unseen[last])
    at[ENTRY.ending] -= 1
    at[ENTRY.preempted] += 1
    at[ENTRY.gone] += 1
    for place in range(last, first + at[ENTRY.ending]):
        move(state, place + 1, place)
    return True


@called
def comes_later(state: ReplayState, row: int, other: int) -> bool:
    """Whether `row` is preempted before `other`: it is after it in queue order, or was admitted later."""
    if not state.rules.by_priority:
        return bool(state.batch.entered[row] > state.batch.entered[other])
    one, best = state.batch.request[row], state.batch.request[other]
    priority, place = state.inputs.priority, state.requests.place
    return bool((priority[one], place[one]) > (priority[best], place[best]))


@called
def release_ended(state: ReplayState, row: int, unseen: int) -> None:
    """`row` has ended: release its blocks, of which those with its last `unseen` tokens are not kept."""
    state.at[ENTRY.sequences] -= state.inputs.width[state.batch.request[row]]
    release_row(state, row, False, unseen)


@called
def wait_for_end(state: ReplayState) -> None:
    """The step under way is over: what the one before it ended is released."""
    at, first = state.at, state.rules.max_rows
    for row in range(first, first + at[ENTRY.ending]):
        release_ended(state, row, 0)
    at[ENTRY.ending] = at[ENTRY.gone] = at[ENTRY.under_way] = 0


@inlined
def has_rows(state: ReplayState) -> bool:
    """Whether the step under way computes anything."""
    rows = 0
    for row in range(state.at[ENTRY.running]):
        rows += state.batch.query[row]
    return rows > 0


@inlined
def query_tokens(state: ReplayState, row: int, cap: int) -> int:
    """Query tokens of `row` in this step, with drafts; where there are drafts, one token is kept for their model."""
    lacking, budget = lacking_tokens(state, row), state.at[ENTRY.budget]
    if not state.rules.drafts:
        return int(min(lacking, budget, cap))
    return within(state, row, min(lacking + drafts_of(state, row), budget - 1, cap))


@called
def last_in_queue(state: ReplayState, row: int) -> int:
    """The row that is last in queue order; those that are not steady keep what they have got in this step."""
    at, last = state.at, row
    for other in range(at[ENTRY.running]):
        if not at[ENTRY.steady] <= other < row and comes_later(state, other, last):
            last = other
    return last


@called
def take_back(state: ReplayState, row: int) -> None:
    """Steady `row` does not run in this step after all."""
    at, batch = state.at, state.batch
    branches = batch.branches[row]
    at[ENTRY.budget] += branches
    at[ENTRY.written] -= branches * state.rules.token_slots
    blocks = batch.blocks[row] - blocks_of(batch.computed[row], state.rules.block_size)
    at[ENTRY.taken] -= branches * blocks * max(1, state.rules.groups)


@called
def extend(state: ReplayState, row: int, query: int) -> None:
    """Each branch of `row` computes `query` tokens in this step; the blocks that this needs are free."""
    state.batch.query[row] = query
    if state.rules.groups:
        extend_pages(state, row, query)
        return
    if state.batch.behind[row]:
        catch_up(state, row, query)
        return
    if state.batch.branches[row] > 1:
        extend_branches(state, row)
        return
    needed = needed_blocks(state, row, query)
    if needed > 0:
        take(state, row, needed)
    certain = state.batch.computed[row] + query
    if state.rules.drafts:
        note_drafts(state, row, lacking_tokens(state, row), query)
        certain -= state.drafting.drafts[row]
    name_blocks(state, row, certain)
    state.at[ENTRY.written] += query


@called
def preempt(state: ReplayState, row: int) -> None:
    """Preempt `row`: it loses its blocks and waits again. The prompt was computed once for all branches.

    What has generated tokens is saved where preempted requests are swapped and host memory has room.
    """
    at, batch, requests = state.at, state.batch, state.requests
    request = batch.request[row]
    if row < at[ENTRY.steady]:
        at[ENTRY.steady] -= 1
        at[ENTRY.steady_rows] -= batch.branches[row]
    computed = -(batch.branches[row] - 1) * state.inputs.prompt[request]
    for branch in range(batch.branches[row]):
        computed += branch_tokens(state, row, branch, 0)
    swaps = state.rules.swaps and batch.generated[row] and batch.distinct[row] <= at[ENTRY.host]
    left = 0 if swaps else max(0, requests.lost[request] - computed)  # of what it lost before
    requests.lost[request] = computed + left
    requests.recomputed[request] -= left
    unseen = 0 if swaps else at[ENTRY.under_way] * batch.unseen[row]
    release_row(state, row, not swaps, unseen)
    requests.generated[request] = batch.generated[row]
    requests.last_token[request] = batch.last_token[row]
    requests.preemptions[request] += 1
    at[ENTRY.sequences] -= state.inputs.width[request]
    at[ENTRY.preempted] += 1
    at[ENTRY.running] -= 1
    for place in range(row, at[ENTRY.running]):
        move(state, place + 1, place)
    if swaps:
        priority, place = state.inputs.priority[request], requests.place[request]
        push(state.swapped, at[ENTRY.swapped], priority, place, request)
        at[ENTRY.swapped] += 1
        move_blocks(state, -blocks_of(requests.lost[request], state.rules.block_size))
    else:
        put_back(state, request)


@called
def move_blocks(state: ReplayState, freed: int) -> None:
    """Move blocks between device and host, where `freed` are free then, or taken if negative."""
    state.at[ENTRY.host] += freed
    state.at[ENTRY.moved] += abs(freed)


@called
def may_return(state: ReplayState) -> bool:
    """Whether the batch has room for the first swapped request, and its blocks and those of its next step are free."""
    at, rules, size = state.at, state.rules, state.rules.block_size
    request = state.swapped.request[0]
    computed = state.requests.lost[request]
    spare = rules.watermark_blocks if at[ENTRY.running] + at[ENTRY.ending] else 0
    needed = blocks_of(computed, size) + (computed % size == 0) + spare
    has_room = at[ENTRY.sequences] + state.inputs.width[request] <= rules.max_running
    return bool(has_room and needed <= free_blocks(state))


@called
def swap_in(state: ReplayState) -> None:
    """The first swapped request becomes the last row again; its blocks are new, and full ones get names."""
    at, batch = state.at, state.batch
    request, row = pop(state.swapped, at[ENTRY.swapped]), at[ENTRY.running]
    at[ENTRY.swapped] -= 1
    computed = state.requests.lost[request]
    blocks = blocks_of(computed, state.rules.block_size)
    place_row(state, request)
    batch.computed[row], batch.blocks[row], batch.distinct[row], batch.named[row] = computed, 0, 0, 0
    take(state, row, blocks)
    at[ENTRY.taken] -= blocks
    at[ENTRY.written] += computed
    name_blocks(state, row, computed)
    move_blocks(state, blocks)
    query = min(lacking_tokens(state, row), at[ENTRY.budget], prefill_cap(state))
    batch.query[row] = 0
    if needed_blocks(state, row, query) <= free_blocks(state):
        extend(state, row, query)
        at[ENTRY.budget] -= query


@called
def place_row(state: ReplayState, request: int) -> None:
    """`request`, which has one branch, becomes the last row; it has no blocks yet."""
    at, batch, row = state.at, state.batch, state.at[ENTRY.running]
    at[ENTRY.running] += 1
    at[ENTRY.entered] += 1
    at[ENTRY.sequences] += state.inputs.width[request]
    batch.entered[row], batch.chose[row], batch.unseen[row] = at[ENTRY.entered], 0, 0
    batch.request[row] = request
    batch.branches[row], batch.copies[row], batch.slot[row], batch.behind[row] = 1, 0, NEVER, 0
    batch.generated[row] = state.requests.generated[request]
    batch.last_token[row] = state.requests.last_token[request]


@inlined
def move(state: ReplayState, row: int, place: int) -> None:
    """Move `row` to `place`, so that the batch has no gaps."""
    if row == place:
        return
    for column in members(state.batch):
        column[place] = column[row]


@called
def admit(state: ReplayState) -> None:
    """Admit in the order of the queue; the first request that does not fit ends the loop."""
    at = state.at
    while at[ENTRY.budget] > 0 and at[ENTRY.head] < at[ENTRY.tail] and may_enter(state):
        enter(state)


@called
def may_enter(state: ReplayState) -> bool:
    """Whether the head of the queue fits the batch, the token budget and the free blocks."""
    at, rules = state.at, state.rules
    request, budget = first_waiting(state), at[ENTRY.budget]
    width = state.inputs.width[request]
    if at[ENTRY.sequences] + width > rules.max_running:
        return False
    known = tokens = state.inputs.prompt[request] + state.requests.generated[request]
    if width > 1:
        tokens = state.inputs.prompt[request]
    asked, first = asked_blocks(state, request), min(budget, prefill_cap(state))
    spare = rules.watermark_blocks if at[ENTRY.running] + at[ENTRY.ending] else 0
    if rules.groups:
        hits, _ = find_prefix(state, request, asked)
        cached = hits * rules.block_size
        chunk_end = min(tokens, cached + first)
        lasting = tokens if rules.whole_prompt else chunk_end
        if not rules.chunked and tokens - cached > budget:
            return False
        return lacking_to_enter(state, request, hits, lasting, chunk_end) + spare <= free_blocks(state)
    hits = named_hits(state, request, asked)
    found = hits + own_hits(state, request, hits, asked)
    if state.tiers.chunk:
        found += loadable(state.tiers, request, found, asked, False)
    cached = found * rules.block_size
    padded = is_padded(state, request, tokens - cached, cached)
    if rules.drafts:
        budget -= 1
        first = min(first, budget)
        if budget <= 0 or (padded and 1 + rules.drafts > budget):
            return False
    if not rules.chunked and tokens - cached > budget:
        return False
    needed = blocks_of(known, rules.block_size)
    if not rules.whole_prompt and cached + first < tokens:
        needed = blocks_of(cached + first, rules.block_size)
    elif width > 1:  # its branches share the full blocks of the prompt
        shared = state.inputs.prompt[request] // rules.block_size
        needed = shared + width * (needed - shared)
    if rules.drafts:  # they go further
        end = min(tokens, cached + first) + (2 if padded else 1) * rules.drafts
        end = min(end, rules.longest) if rules.longest else end
        needed = max(needed, blocks_of(end, rules.block_size))
    needed += unused_hits(state, request, hits) - hits
    return bool(needed + spare <= free_blocks(state))


@called
def enter(state: ReplayState) -> None:
    """The head of the queue becomes the last row, with its first chunk."""
    at, batch, cap = state.at, state.batch, prefill_cap(state)
    request, row = take_first(state), at[ENTRY.running]
    at[ENTRY.admitted] += 1
    place_row(state, request)
    asked = asked_blocks(state, request)
    if state.rules.groups:
        hits, longest = find_prefix(state, request, asked)
        share_pages(state, row, hits, longest)
    else:
        hits = named_hits(state, request, asked)
        own = own_hits(state, request, hits, asked)
        share(state, row, hits, own)
        if state.tiers.chunk and hits + own < asked:
            load(state, row, hits + own, asked)
    cached = batch.computed[row]
    note_entry(state, request, cached)
    query = query_tokens(state, row, cap)
    if is_padded(state, request, lacking_tokens(state, row), cached):
        query = within(state, row, min(1 + state.rules.drafts, at[ENTRY.budget] - 1, cap))
    extend(state, row, query)
    at[ENTRY.budget] -= query + (state.rules.drafts > 0)


@called
def note_entry(state: ReplayState, request: int, cached: int) -> None:
    """Record that `request` enters the batch, with `cached` tokens that it found in the cache."""
    requests = state.requests
    if requests.scheduled[request] == NEVER:
        requests.scheduled[request] = state.at[ENTRY.now]
    if not requests.preemptions[request]:
        requests.hits[request] += cached
    else:
        requests.resumed_hits[request] += cached
        requests.recomputed[request] += max(0, requests.lost[request] - cached)
    state.at[ENTRY.hits] += cached
