"""The cost of the step under way.

It computes the features of `harness.replay.features` and prices them with the same operations in the same order.
"""

from typing import Any

import numpy as np

from harness.compiled.drafts import write_draft_features
from harness.compiled.numba_edge import called, inlined
from harness.compiled.pool import blocks_of, branch_tokens
from harness.compiled.scheduling import samples
from harness.compiled.state import ENTRY, Prices, ReplayState
from harness.cost import roofline
from harness.cost.fitted import FittedCost
from harness.replay.cost_model import CostModel, PacedCost
from harness.replay.features import AT, LARGE_PREFILL, WARMING, unseen, unseen_pairs

ROOFLINE, LINEAR = 0, 1
for _each in (unseen, unseen_pairs, *roofline.SHARED):
    called(_each)


def prices_of(cost: CostModel) -> Prices | None:
    """`cost` as numbers; None for a model that is neither a roofline nor linear in its features."""
    if isinstance(cost, PacedCost):
        paced = prices_of(cost.cost)
        return None if paced is None else paced._replace(ratio=paced.ratio * cost.ratio)
    if type(cost) is roofline.RooflineCost:
        return Prices(ROOFLINE, np.array(cost.rates), np.zeros(0, dtype=np.int64), 0, 1.0, cost.reading)
    if type(cost) is FittedCost:
        terms = [*cost.attention_terms, *cost.rest_terms]
        columns = np.array([column for column, _ in terms], dtype=np.int64)
        rates = np.array([seconds for _, seconds in terms], dtype=np.float64)
        return Prices(LINEAR, rates, columns, len(cost.attention_terms), 1.0, np.zeros(1))
    return None


@inlined
def write_features(state: ReplayState, num_blocks: int) -> None:
    """Write the features of the step under way into `state.features`. Features of other requests stay 0."""
    add_rows(state)
    features, size = state.features, state.rules.block_size
    if state.at[ENTRY.entries]:
        physical = num_blocks - state.at[ENTRY.empty] - state.at[ENTRY.cached]
        features[AT.decode_distinct_kv] *= physical / state.at[ENTRY.entries]
    features[AT.new_blocks] = state.at[ENTRY.taken]
    features[AT.copied_slots] = state.at[ENTRY.copies] * size
    features[AT.freed_slots] = state.at[ENTRY.voided] * size
    features[AT.swapped_slots] = state.at[ENTRY.moved] * size
    features[AT.swapped_blocks] = state.at[ENTRY.moved]
    features[AT.admitted_tokens] = 0
    for row in range(state.at[ENTRY.running] - state.at[ENTRY.admitted], state.at[ENTRY.running]):
        features[AT.admitted_tokens] += state.inputs.prompt[state.batch.request[row]]
    if state.rules.window:
        write_unseen(state)
    if state.rules.drafts:
        write_draft_features(state)
    features[AT.after_prefill] = state.after_prefill[0]


@inlined
def add_rows(state: ReplayState) -> None:
    """The features that follow from the rows."""
    batch, size = state.batch, state.rules.block_size
    decodes = kv = longest = sampled = drawn = searching = entries = 0
    chunks = chunk_tokens = chunk_kv = chunk_blocks = 0
    work = 0.0
    for row in range(state.at[ENTRY.running]):
        query = batch.query[row]
        if not query:
            continue
        end, branches, parts = batch.computed[row] + query, batch.branches[row], 1
        if row < state.at[ENTRY.steady] or samples(state, row):
            sampled += branches
            drawn += branches * state.inputs.drawn[batch.request[row]]
            searching += branches * state.inputs.beam[batch.request[row]]
        if batch.behind[row]:  # each branch has its own length
            branches, parts = 1, branches
        for part in range(parts):
            if batch.behind[row]:
                end = branch_tokens(state, row, part, batch.query[row])
                query = end - branch_tokens(state, row, part, 0)
                if not query:
                    continue
            blocks = blocks_of(end, size)
            entries += branches * blocks
            if query == 1:
                decodes, kv, longest = decodes + branches, kv + branches * end, max(longest, end)
            else:
                chunks, chunk_tokens = chunks + 1, chunk_tokens + query
                chunk_kv, chunk_blocks = chunk_kv + end, chunk_blocks + blocks
                work += query * (end - (query - 1) / 2)
    tokens, features = decodes + chunk_tokens, state.features
    features[AT.step] = 1
    features[AT.tokens] = tokens
    features[AT.tokens_to_2] = min(tokens, 2)
    features[AT.tokens_to_8] = min(tokens, 8)
    features[AT.tokens_to_32] = min(tokens, 32)
    features[AT.tokens_to_128] = min(tokens, 128)
    features[AT.tokens_beyond_128] = max(tokens - 128, 0)
    features[AT.rows] = decodes + chunks
    features[AT.sampled_rows] = sampled
    features[AT.drawn_rows] = drawn
    features[AT.beam_rows] = searching
    features[AT.beam_rows_to_16] = min(searching, 16)
    features[AT.beam_steps] = min(searching, 1)
    features[AT.decode_rows] = decodes
    features[AT.decode_steps] = min(decodes, 1)
    features[AT.decode_inputs] = min(decodes, 1)
    features[AT.decode_kv] = kv
    features[AT.decode_distinct_kv] = kv
    features[AT.decode_padded_kv] = decodes * longest
    features[AT.decode_padded_blocks] = decodes * blocks_of(longest, size)
    features[AT.prefill_rows] = chunks
    features[AT.prefill_tokens] = chunk_tokens
    features[AT.prefill_kv] = chunk_kv
    features[AT.prefill_blocks] = chunk_blocks
    features[AT.prefill_work] = work
    features[AT.blocks] = entries


@called
def write_unseen(state: ReplayState) -> None:
    """The features of what lies outside of the model's window (`harness.replay.features`)."""
    batch, features, window, chunked = state.batch, state.features, state.rules.window, state.rules.in_chunks
    decode = chunk_kv = work = 0
    for row in range(state.at[ENTRY.running]):
        for part in range(batch.branches[row] if batch.behind[row] else 1):
            held = branch_tokens(state, row, part, 0) if batch.behind[row] else batch.computed[row]
            query = batch.query[row]
            if batch.behind[row]:
                query = branch_tokens(state, row, part, query) - held
            if query == 1:
                decode += unseen(held, window, chunked) * (1 if batch.behind[row] else batch.branches[row])
            elif query:
                chunk_kv += unseen(held, window, chunked)
                work += unseen_pairs(held + query, window, chunked) - unseen_pairs(held, window, chunked)
    features[AT.decode_unseen_kv] = decode
    features[AT.prefill_unseen_kv] = chunk_kv
    features[AT.prefill_unseen_work] = work


@inlined
def note_prefill(state: ReplayState) -> None:
    """Update `after_prefill` after a step: a large prefill slows the next steps down."""
    large = min(1.0, state.features[AT.prefill_tokens] / LARGE_PREFILL)
    state.after_prefill[0] = state.after_prefill[0] * WARMING + large


@inlined
def price(state: ReplayState) -> tuple[float, float]:
    """Seconds of the step and of its attention."""
    seconds, attention_s = by_roofline(state) if state.prices.kind == ROOFLINE else linear(state)
    return seconds * state.prices.ratio, attention_s * state.prices.ratio


@inlined
def by_roofline(state: ReplayState) -> tuple[Any, Any]:
    """`RooflineCost.price`."""
    features: Any = state.features
    rates: Any = state.prices.rates
    tokens, reading = features[AT.tokens], state.prices.reading
    decodes, prompts = roofline.attention_of(features, rates)
    attention_s = decodes + prompts + roofline.fixed_of(rates, features[AT.rows])
    weights_s = reading[min(int(tokens), len(reading) - 1)]
    dense = roofline.dense_of(features, rates, tokens * rates[roofline.RATE.token], weights_s)
    seconds = roofline.step_of(features, rates, dense, attention_s)
    return roofline.with_moves(features, rates, seconds), attention_s


@called
def linear(state: ReplayState) -> tuple[float, float]:
    """`FittedCost.price`: terms in their order, those of attention first."""
    prices = state.prices
    total = attention_s = 0.0
    for term in range(len(prices.columns)):
        total = total + state.features[prices.columns[term]] * prices.rates[term]
        if term == prices.attention - 1:
            attention_s = total
    return total, attention_s
