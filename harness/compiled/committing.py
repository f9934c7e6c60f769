"""The end of a step: tokens, finished requests and the log.

It does what `engine.core.scheduling.commit` and the recorder do, in one pass.
"""

from harness.compiled.arriving import note_end
from harness.compiled.branches import fork, is_beam, reparent
from harness.compiled.drafts import kept_drafts
from harness.compiled.groups import log_waste, lost_slots
from harness.compiled.numba_edge import called, inlined
from harness.compiled.pool import blocks_of
from harness.compiled.scheduling import lacking_tokens, move, release_ended, samples, wait_for_end
from harness.compiled.state import ENTRY, ReplayState
from harness.metrics.log import COLUMN
from harness.replay.arrivals import NEVER
from harness.replay.features import AT


@inlined
def log_step(state: ReplayState, num_blocks: int, took_ns: int, attention_s: float) -> None:
    """Log the step under way; slot states are those while it runs."""
    at, features, size, lost = state.at, state.features, state.rules.page_slots, 0
    if state.rules.groups:
        lost = lost_slots(state)
        log_waste(state)
    record, used = state.log.records[at[ENTRY.steps]], num_blocks - at[ENTRY.empty] - at[ENTRY.cached]
    record[COLUMN.start_ns] = at[ENTRY.now]
    record[COLUMN.ns] = took_ns
    record[COLUMN.rows] = int(features[AT.rows])
    record[COLUMN.decode_rows] = int(features[AT.decode_rows])
    record[COLUMN.prefill_tokens] = int(features[AT.prefill_tokens])
    record[COLUMN.query_tokens] = int(features[AT.tokens])
    record[COLUMN.kv_read_tokens] = int(features[AT.decode_kv] + features[AT.prefill_kv])
    record[COLUMN.sampled_rows] = int(features[AT.sampled_rows])
    record[COLUMN.new_blocks] = at[ENTRY.taken]
    record[COLUMN.copies] = at[ENTRY.copies]
    record[COLUMN.frees] = at[ENTRY.voided]
    record[COLUMN.preempted] = at[ENTRY.preempted]
    record[COLUMN.admitted] = at[ENTRY.admitted]
    record[COLUMN.hit_tokens] = at[ENTRY.hits]
    record[COLUMN.running] = at[ENTRY.running] + at[ENTRY.ending]
    record[COLUMN.waiting] = at[ENTRY.tail] - at[ENTRY.head] + at[ENTRY.swapped] + at[ENTRY.gone]
    record[COLUMN.token] = at[ENTRY.written]
    record[COLUMN.cached] = at[ENTRY.cached] * size
    record[COLUMN.reserved] = used * size - at[ENTRY.written] - at[ENTRY.internal] - lost
    record[COLUMN.internal] = at[ENTRY.internal] + lost
    record[COLUMN.free] = at[ENTRY.empty] * size
    record[COLUMN.logical_blocks] = at[ENTRY.entries]
    record[COLUMN.physical_blocks] = used
    state.log.attention_s[at[ENTRY.steps]] = attention_s
    at[ENTRY.steps] += 1
    at[ENTRY.voided] = at[ENTRY.taken] = at[ENTRY.copies] = at[ENTRY.hits] = at[ENTRY.moved] = 0
    at[ENTRY.admitted] = at[ENTRY.preempted] = at[ENTRY.gone] = 0


@inlined
def commit(state: ReplayState, end: int) -> None:
    """End the step at `end` ns: rows advance, finished rows leave, and leading rows that only decode become steady."""
    at, batch = state.at, state.batch
    together, kept, steady, verified = 0, 0, at[ENTRY.steady], 0
    drafts, ahead = state.rules.drafts, state.rules.ahead
    if at[ENTRY.ending]:
        wait_for_end(state)
    at[ENTRY.under_way] = ahead
    for row in range(at[ENTRY.running]):
        has_token = (row < steady and batch.query[row] > 0) or samples(state, row)
        if drafts or ahead:
            batch.unseen[row] = batch.chose[row] if batch.query[row] else 0
            if batch.query[row]:
                batch.chose[row] = has_token
        if row >= steady and batch.behind[row]:
            advance_behind(state, row)
        else:
            batch.computed[row] += batch.query[row]
        if drafts and batch.query[row]:
            verified += verify(state, row)
        if has_token:
            together += note_token(state, row, end)
        if batch.generated[row] == state.inputs.output[batch.request[row]]:
            if row < steady:
                at[ENTRY.steady] -= 1
                at[ENTRY.steady_rows] -= batch.branches[row]
            finish(state, row, end)
        else:
            if row >= steady:
                branch(state, row, has_token)
            move(state, row, kept)
            kept += 1
    at[ENTRY.running] = kept
    if together:
        log_gap(state, end - at[ENTRY.last_end], together)
    if verified:
        log_gap(state, 0, verified)
    at[ENTRY.last_end] = end
    settle(state)


@called
def verify(state: ReplayState, row: int) -> int:
    """Keep the right drafts of `row`, as far as its request goes; returns how many. Slots of the others are void."""
    batch, drafts, kept = state.batch, state.drafting.drafts[row], 0
    if drafts:
        kept = kept_drafts(state, row)
        batch.computed[row] -= drafts - kept
        state.at[ENTRY.written] -= drafts - kept
        batch.generated[row] += kept
    return kept


@called
def advance_behind(state: ReplayState, row: int) -> None:
    """Branches of `row` have computed tokens again; when the last has caught up, they are equally long."""
    batch = state.batch
    batch.behind[row] -= batch.query[row]
    if not batch.behind[row]:
        batch.computed[row] += batch.generated[row] - 1
        batch.blocks[row] = blocks_of(batch.computed[row], state.rules.block_size)


@inlined
def branch(state: ReplayState, row: int, has_token: bool) -> None:
    """`row` goes on: at the end of its prompt it forks, and with each later token beams get new parents."""
    batch = state.batch
    request = batch.request[row]
    if batch.branches[row] > 1:
        if has_token and is_beam(state, row):
            reparent(state, row)
    elif state.inputs.width[request] > 1 and batch.computed[row] == state.inputs.prompt[request]:
        fork(state, row)


@inlined
def note_token(state: ReplayState, row: int, end: int) -> int:
    """`row` has one more token. Returns 1 if the step before gave it one too: `commit()` logs that gap for all rows."""
    batch, before = state.batch, state.batch.last_token[row]
    batch.generated[row] += 1
    batch.last_token[row] = end
    if before == NEVER:
        state.requests.first_token[batch.request[row]] = end
    elif before == state.at[ENTRY.last_end]:
        return 1
    else:
        log_gap(state, end - before, 1)
    return 0


@inlined
def log_gap(state: ReplayState, ns: int, weight: int) -> None:
    """Log a gap between tokens that occurred `weight` times."""
    state.log.gap_ns[state.at[ENTRY.gaps]] = ns
    state.log.gap_weight[state.at[ENTRY.gaps]] = weight
    state.at[ENTRY.gaps] += 1


@called
def finish(state: ReplayState, row: int, end: int) -> None:
    """`row` has all its tokens."""
    state.requests.finish[state.batch.request[row]] = end
    note_end(state, state.batch.request[row], end)
    if state.rules.ahead:
        move(state, row, state.rules.max_rows + state.at[ENTRY.ending])
        state.at[ENTRY.ending] += 1
    else:
        release_ended(state, row, 0)


@inlined
def settle(state: ReplayState) -> None:
    """Make leading rows steady that only decode from now on. They always run, so their branches fit the budget."""
    at, batch = state.at, state.batch
    while at[ENTRY.steady] < at[ENTRY.running]:
        row = at[ENTRY.steady]
        if not is_steady(state, row) or at[ENTRY.steady_rows] + batch.branches[row] > state.rules.budget:
            return
        at[ENTRY.steady] += 1
        at[ENTRY.steady_rows] += batch.branches[row]


@inlined
def is_steady(state: ReplayState, row: int) -> bool:
    """Whether every branch of `row` computes one token a step from now on, into blocks of its own."""
    batch = state.batch
    if state.rules.drafts or not batch.generated[row] or batch.behind[row] or lacking_tokens(state, row) != 1:
        return False
    request = batch.request[row]
    forked = state.inputs.width[request] == 1 or batch.computed[row] > state.inputs.prompt[request]
    return bool(forked and not state.inputs.beam[request])
