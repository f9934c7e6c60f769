"""Which tokens the next step computes, who is preempted, who arrives and who is admitted.

It follows `engine.core.scheduling.scheduler`, for requests that are
rows of lengths.
"""

from harness.compiled.numba_edge import part
from harness.compiled.pool import blocks_of, cached_blocks, free_blocks, release, revive, take
from harness.compiled.state import (
    ADMITTED,
    ARRIVED,
    ENDED,
    HEAD,
    HITS,
    NEVER,
    NOW,
    PREEMPTED,
    RUNNING,
    STEADY,
    TAIL,
    WRITTEN,
    Run,
)


@part
def known_tokens(run: Run, row: int) -> int:
    """Tokens of `row`: its prompt, and what it has generated."""
    return int(run.lengths.prompt[run.batch.request[row]] + run.batch.generated[row])


@part
def lacking_tokens(run: Run, row: int) -> int:
    """Known tokens of `row` that are not computed."""
    return int(known_tokens(run, row) - run.batch.computed[row])


@part
def prefill_cap(run: Run) -> int:
    """The largest chunk of one prompt: a lone request gets the whole budget."""
    alone = run.at[RUNNING] + run.at[TAIL] - run.at[HEAD] <= 1
    return run.rules.budget if alone or not run.rules.prefill_cap else run.rules.prefill_cap


@part
def continue_running(run: Run) -> int:
    """Every row gets its query tokens and the blocks for them, in order of admission; returns what the budget has left.

    Steady rows, which only decode, always run. Where blocks are short, the row that was admitted last makes room.
    """
    row = 0
    while row < run.at[STEADY]:
        extend_or_make_room(run, row, 1)
        row += 1
    budget, cap = run.rules.budget - run.at[STEADY], prefill_cap(run)
    row = run.at[STEADY]
    while row < run.at[RUNNING]:
        query = min(lacking_tokens(run, row), budget, cap)
        run.batch.query[row] = 0
        if query > 0 and extend_or_make_room(run, row, query):
            budget -= query
        row += 1
    return int(budget)


@part
def extend_or_make_room(run: Run, row: int, query: int) -> bool:
    """`row` computes `query` tokens in this step; False where it had to make room itself."""
    lacking = blocks_of(run.batch.computed[row] + query, run.rules.block_size) - run.batch.blocks[row]
    while lacking > free_blocks(run):
        preempt_last(run)
        if row == run.at[RUNNING]:
            return False
    extend(run, row, query, lacking)
    return True


@part
def extend(run: Run, row: int, query: int, blocks: int) -> None:
    """`row` computes `query` tokens in this step, with `blocks` more blocks, which are free."""
    if blocks > 0:
        take(run, row, blocks)
    run.batch.query[row] = query
    run.at[WRITTEN] += query


@part
def preempt_last(run: Run) -> None:
    """The last row gives up its blocks and waits at the head of the queue: all who wait came after it."""
    at, batch, lives = run.at, run.batch, run.lives
    at[RUNNING] -= 1
    at[STEADY] = min(at[STEADY], at[RUNNING])
    row = at[RUNNING]
    request = batch.request[row]
    release(run, row, request)
    lives.generated[request] = batch.generated[row]
    lives.last_token[request] = batch.last_token[row]
    lives.lost[request] = batch.computed[row]
    lives.preemptions[request] += 1
    at[PREEMPTED] += 1
    at[HEAD] -= 1
    lives.queue[at[HEAD]] = request


@part
def take_arrivals(run: Run) -> None:
    """Queue the requests that have arrived by now; those that can never be served have ended."""
    at, lengths, lives = run.at, run.lengths, run.lives
    while at[ARRIVED] < len(lengths.prompt) and lengths.arrival_ns[at[ARRIVED]] <= at[NOW]:
        if lengths.fits[at[ARRIVED]]:
            lives.queue[at[TAIL]] = at[ARRIVED]
            at[TAIL] += 1
        else:
            lives.ended[at[ENDED]] = at[ARRIVED]
            at[ENDED] += 1
        at[ARRIVED] += 1


@part
def admit(run: Run, budget: int) -> None:
    """Admit in the order of the queue; the first request that does not fit ends the loop."""
    at = run.at
    while budget > 0 and at[HEAD] < at[TAIL] and may_enter(run, budget):
        budget -= enter(run, budget)


@part
def may_enter(run: Run, budget: int) -> bool:
    """Whether the batch has a place for the head of the queue, the budget for its tokens, and the pool room."""
    at, rules = run.at, run.rules
    request = run.lives.queue[at[HEAD]]
    tokens = run.lengths.prompt[request] + run.lives.generated[request]
    cached = cached_blocks(run, request) * rules.block_size
    if at[RUNNING] >= rules.max_running or (not rules.chunked and tokens - cached > budget):
        return False
    if not rules.whole_prompt:
        tokens = min(tokens, cached + budget)
    spare = rules.watermark_blocks if at[RUNNING] else 0
    return bool(blocks_of(tokens, rules.block_size) + spare <= free_blocks(run))


@part
def enter(run: Run, budget: int) -> int:
    """The head of the queue becomes the last row, with its first chunk; returns the chunk's tokens."""
    at, batch, cap = run.at, run.batch, prefill_cap(run)
    request, row = run.lives.queue[at[HEAD]], at[RUNNING]
    at[HEAD] += 1
    at[RUNNING] += 1
    at[ADMITTED] += 1
    batch.request[row] = request
    batch.generated[row] = run.lives.generated[request]
    batch.last_token[row] = run.lives.last_token[request]
    batch.blocks[row] = revive(run, request)
    batch.computed[row] = batch.blocks[row] * run.rules.block_size
    at[WRITTEN] += batch.computed[row]
    note_entry(run, request, batch.computed[row])
    query = min(known_tokens(run, row) - batch.computed[row], budget, cap)
    extend(run, row, query, blocks_of(batch.computed[row] + query, run.rules.block_size) - batch.blocks[row])
    return int(query)


@part
def note_entry(run: Run, request: int, cached: int) -> None:
    """`request` enters the batch, for the first time or with `cached` tokens of its own found again."""
    lives = run.lives
    if lives.scheduled[request] == NEVER:
        lives.scheduled[request] = run.at[NOW]
    if lives.preemptions[request]:
        lives.resumed_hits[request] += cached
        lives.recomputed[request] += max(0, lives.lost[request] - cached)
    run.at[HITS] += cached
