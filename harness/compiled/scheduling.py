"""Scheduling of a step: query tokens, preemption, arrivals and admission.

It does what `engine.core.scheduling.scheduler` does, for requests that are rows of lengths.
"""

from harness.compiled.branches import extend_branches, kept_blocks, needed_blocks
from harness.compiled.numba_edge import jitable
from harness.compiled.pool import (
    blocks_of,
    free_blocks,
    name_blocks,
    named_hits,
    own_hits,
    release,
    share,
    take,
    unused_hits,
)
from harness.compiled.state import (
    ADMITTED,
    HEAD,
    HITS,
    NOW,
    PREEMPTED,
    RUNNING,
    SEQUENCES,
    STEADY,
    STEADY_ROWS,
    TAIL,
    UNFORESEEN,
    WRITTEN,
    ReplayState,
)
from harness.replay.arrivals import NEVER


@jitable
def known_tokens(state: ReplayState, row: int) -> int:
    """Tokens of `row`: its prompt, and what it has generated."""
    return int(state.inputs.prompt[state.batch.request[row]] + state.batch.generated[row])


@jitable
def lacking_tokens(state: ReplayState, row: int) -> int:
    """Known tokens of `row` that are not computed yet."""
    return int(known_tokens(state, row) - state.batch.computed[row])


@jitable
def prefill_cap(state: ReplayState) -> int:
    """The largest chunk of one prompt: a lone request gets the whole budget."""
    alone = state.at[RUNNING] + state.at[TAIL] - state.at[HEAD] <= 1
    return state.rules.budget if alone or not state.rules.prefill_cap else state.rules.prefill_cap


@jitable
def continue_running(state: ReplayState) -> int:
    """Give every row its query tokens and blocks, in order of admission; returns the budget that is left.

    Steady rows, which only decode, always run. Where blocks are short, the row that was admitted last is preempted.
    """
    row, branches = 0, state.batch.branches
    while row < state.at[STEADY]:
        extend_or_preempt(state, row, 1)
        row += 1
    budget, cap = state.rules.budget - state.at[STEADY_ROWS], prefill_cap(state)
    row = state.at[STEADY]
    while row < state.at[RUNNING]:
        query = min(lacking_tokens(state, row), budget, cap)
        if branches[row] > 1 and branches[row] > budget:  # they sample together or not at all
            query = 0
        state.batch.query[row] = 0
        if query > 0 and extend_or_preempt(state, row, query):
            budget -= query * branches[row]
        row += 1
    return int(budget)


@jitable
def extend_or_preempt(state: ReplayState, row: int, query: int) -> bool:
    """`row` computes `query` tokens in this step; rows behind it are preempted where blocks are short.

    Returns False where `row` itself was preempted.
    """
    needed = needed_blocks(state, row, query)
    while needed > free_blocks(state):
        if state.batch.branches[state.at[RUNNING] - 1] > 1:
            state.at[UNFORESEEN] = 1
            return False
        preempt_last(state)
        if row == state.at[RUNNING]:
            return False
    extend(state, row, query)
    return True


@jitable
def extend(state: ReplayState, row: int, query: int) -> None:
    """Each branch of `row` computes `query` tokens in this step; the blocks that this needs are free."""
    state.batch.query[row] = query
    if state.batch.branches[row] > 1:
        extend_branches(state, row)
        return
    needed = needed_blocks(state, row, query)
    if needed > 0:
        take(state, row, needed)
    name_blocks(state, row, state.batch.computed[row] + query)
    state.at[WRITTEN] += query


@jitable
def preempt_last(state: ReplayState) -> None:
    """Preempt the last row, which has one branch: it loses its blocks and waits at the head of the queue."""
    at, batch, requests = state.at, state.batch, state.requests
    at[RUNNING] -= 1
    row = at[RUNNING]
    request = batch.request[row]
    at[SEQUENCES] -= state.inputs.width[request]
    if at[STEADY] > at[RUNNING]:
        at[STEADY] = at[RUNNING]
        at[STEADY_ROWS] -= batch.branches[row]
    release(state, row, kept_blocks(state, row))
    requests.generated[request] = batch.generated[row]
    requests.last_token[request] = batch.last_token[row]
    requests.lost[request] = batch.computed[row]
    requests.preemptions[request] += 1
    at[PREEMPTED] += 1
    at[HEAD] -= 1
    requests.queue[at[HEAD]] = request


@jitable
def admit(state: ReplayState, budget: int) -> None:
    """Admit in the order of the queue; the first request that does not fit ends the loop."""
    at = state.at
    while budget > 0 and at[HEAD] < at[TAIL] and may_enter(state, budget):
        budget -= enter(state, budget)


@jitable
def may_enter(state: ReplayState, budget: int) -> bool:
    """Whether the head of the queue fits the batch, the token budget and the free blocks."""
    at, rules = state.at, state.rules
    request = state.requests.queue[at[HEAD]]
    width = state.inputs.width[request]
    if at[SEQUENCES] + width > rules.max_running:
        return False
    tokens = state.inputs.prompt[request] + state.requests.generated[request]
    hits = named_hits(state, request, (tokens - 1) // rules.block_size)
    cached = (hits + own_hits(state, request, hits)) * rules.block_size
    if not rules.chunked and tokens - cached > budget:
        return False
    needed = blocks_of(tokens, rules.block_size)
    first = min(budget, prefill_cap(state))
    if not rules.whole_prompt and cached + first < tokens:
        needed = blocks_of(cached + first, rules.block_size)
    elif width > 1:  # its branches share the full blocks of the prompt
        shared = state.inputs.prompt[request] // rules.block_size
        needed = shared + width * (needed - shared)
    spare = rules.watermark_blocks if at[RUNNING] else 0
    needed += unused_hits(state, request, hits) - hits
    return bool(needed + spare <= free_blocks(state))


@jitable
def enter(state: ReplayState, budget: int) -> int:
    """The head of the queue becomes the last row, with its first chunk; returns the chunk's tokens."""
    at, batch, cap = state.at, state.batch, prefill_cap(state)
    request, row = state.requests.queue[at[HEAD]], at[RUNNING]
    at[HEAD] += 1
    at[RUNNING] += 1
    at[ADMITTED] += 1
    at[SEQUENCES] += state.inputs.width[request]
    batch.request[row] = request
    batch.branches[row], batch.copies[row], batch.slot[row] = 1, 0, NEVER
    batch.generated[row] = state.requests.generated[request]
    batch.last_token[row] = state.requests.last_token[request]
    hits = named_hits(state, request, (known_tokens(state, row) - 1) // state.rules.block_size)
    share(state, row, hits, own_hits(state, request, hits))
    note_entry(state, request, batch.computed[row])
    query = min(known_tokens(state, row) - batch.computed[row], budget, cap)
    extend(state, row, query)
    return int(query)


@jitable
def note_entry(state: ReplayState, request: int, cached: int) -> None:
    """Record that `request` enters the batch, with `cached` tokens that it found in the cache."""
    requests = state.requests
    if requests.scheduled[request] == NEVER:
        requests.scheduled[request] = state.at[NOW]
    if not requests.preemptions[request]:
        requests.hits[request] += cached
    else:
        requests.resumed_hits[request] += cached
        requests.recomputed[request] += max(0, requests.lost[request] - cached)
    state.at[HITS] += cached
