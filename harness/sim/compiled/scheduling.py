"""Which tokens the next step computes, and who makes room for them: `engine.core.scheduling.scheduler` for
rows of lengths.
"""

from harness.sim.compiled.compiling import part
from harness.sim.compiled.pool import blocks_of, free_blocks, release, take
from harness.sim.compiled.state import HEAD, PREEMPTED, RUNNING, STEADY, TAIL, WRITTEN, Run


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
