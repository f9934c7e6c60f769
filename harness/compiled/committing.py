"""The result of a step: tokens, finished requests and the log. `engine.core.scheduling.commit` and the
recorder in one pass.
"""

from harness.compiled.numba_edge import part
from harness.compiled.pool import release
from harness.compiled.pricing import DECODE_KV, DECODE_ROWS, PREFILL, PREFILL_KV, ROWS, SAMPLED, TOKENS
from harness.compiled.scheduling import lacking_tokens
from harness.compiled.state import (
    ADMITTED,
    CACHED,
    ENDED,
    GAPS,
    HEAD,
    HITS,
    INTERNAL,
    LAST_END,
    NEVER,
    NOW,
    PREEMPTED,
    RUNNING,
    STEADY,
    STEPS,
    TAIL,
    TAKEN,
    UNNAMED,
    VOIDED,
    WRITTEN,
    Run,
)


@part
def log_step(run: Run, num_blocks: int, took_ns: int, attention_s: float) -> None:
    """Enter the step under way; slot states are those while it runs."""
    at, features, size = run.at, run.features, run.rules.block_size
    counts = (  # in the order of COUNTS
        *(at[NOW], took_ns, int(features[ROWS]), int(features[DECODE_ROWS]), int(features[PREFILL])),
        *(int(features[TOKENS]), int(features[DECODE_KV] + features[PREFILL_KV]), int(features[SAMPLED])),
        *(at[TAKEN], at[VOIDED], at[ADMITTED], at[PREEMPTED], at[HITS], at[RUNNING], at[TAIL] - at[HEAD]),
        *(at[WRITTEN], at[CACHED] * size, at[INTERNAL], at[UNNAMED] * size),
        num_blocks - at[UNNAMED] - at[CACHED],
    )
    for column in range(len(counts)):
        run.log.counts[at[STEPS], column] = counts[column]
    run.log.attention_s[at[STEPS]] = attention_s
    at[STEPS] += 1
    at[VOIDED] = at[TAKEN] = at[ADMITTED] = at[PREEMPTED] = at[HITS] = 0


@part
def commit(run: Run, end: int) -> None:
    """The step ends at `end` ns: rows advance, finished ones leave, and leading ones that only decode are steady."""
    at, batch = run.at, run.batch
    together, kept, steady = 0, 0, at[STEADY]
    for row in range(at[RUNNING]):
        samples = batch.query[row] > 0 and batch.query[row] == lacking_tokens(run, row)
        batch.computed[row] += batch.query[row]
        if samples:
            together += note_token(run, row, end)
        if batch.generated[row] == run.lengths.output[batch.request[row]]:
            at[STEADY] -= row < steady
            finish(run, row, end)
        else:
            move(run, row, kept)
            kept += 1
    at[RUNNING] = kept
    if together:
        log_gap(run, end - at[LAST_END], together)
    at[LAST_END] = end
    settle(run)


@part
def note_token(run: Run, row: int, end: int) -> int:
    """`row` has one more token; returns 1 if it had one from the step before too, whose gap is that of many rows."""
    batch, before = run.batch, run.batch.last_token[row]
    batch.generated[row] += 1
    batch.last_token[row] = end
    if before == NEVER:
        run.lives.first_token[batch.request[row]] = end
    elif before == run.at[LAST_END]:
        return 1
    else:
        log_gap(run, end - before, 1)
    return 0


@part
def log_gap(run: Run, ns: int, weight: int) -> None:
    """Enter a gap between tokens that occurred `weight` times."""
    run.log.gap_ns[run.at[GAPS]] = ns
    run.log.gap_weight[run.at[GAPS]] = weight
    run.at[GAPS] += 1


@part
def finish(run: Run, row: int, end: int) -> None:
    """`row` has all its tokens."""
    release(run, row, NEVER)
    run.lives.finish[run.batch.request[row]] = end
    run.lives.ended[run.at[ENDED]] = run.batch.request[row]
    run.at[ENDED] += 1


@part
def move(run: Run, row: int, place: int) -> None:
    """`row` closes up to `place`."""
    if row == place:
        return
    for column in (
        run.batch.request,
        run.batch.computed,
        run.batch.generated,
        run.batch.blocks,
        run.batch.last_token,
    ):
        column[place] = column[row]


@part
def settle(run: Run) -> None:
    """The leading rows that lack one token are steady from now on: they always run, so they must fit the budget."""
    at, batch = run.at, run.batch
    while at[STEADY] < min(at[RUNNING], run.rules.budget):
        row = at[STEADY]
        if not batch.generated[row] or lacking_tokens(run, row) != 1:
            return
        at[STEADY] += 1
