"""Who arrives, and who enters the batch: `engine.core.scheduling.scheduler` for rows of lengths."""

from harness.sim.compiled.cached import cached_blocks, revive
from harness.sim.compiled.compiling import part
from harness.sim.compiled.pool import blocks_of, free_blocks
from harness.sim.compiled.scheduling import extend, known_tokens, prefill_cap
from harness.sim.compiled.state import (
    ADMITTED,
    ARRIVED,
    ENDED,
    HEAD,
    HITS,
    NEVER,
    NOW,
    RUNNING,
    TAIL,
    WRITTEN,
    Run,
)


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
