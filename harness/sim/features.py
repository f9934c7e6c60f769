"""What a step's plan says about its cost: the physical quantities that every cost model prices.

The same function serves a simulated and a measured step, and all steps of a fast-forward at once.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from engine.core.plan import IntArray, StepPlan
from engine.core.request import Decoding, Request
from harness.sim.cost import Amount

FEATURES: dict[str, str] = {
    "step": "1: the floor of a step",
    "tokens": "query tokens: work of the dense layers",
    "tokens_to_8": "query tokens, at most 8: small matrices do not cost in proportion",
    "tokens_to_32": "query tokens, at most 32",
    "tokens_to_128": "query tokens, at most 128",
    "rows": "sequences in the batch: host work",
    "sampled_rows": "rows that meet the vocabulary projection",
    "beam_rows": "sampled rows of beam groups: selection over the whole vocabulary",
    "decode_rows": "rows of one token",
    "decode_steps": "1 if there is such a row: the floor of decode attention",
    "decode_kv": "KV slots that decode rows read",
    "decode_padded_kv": "decode rows times the longest of them: what a padded batch reads",
    "prefill_rows": "rows of more than one token: each is an attention call of its own",
    "prefill_kv": "KV slots that those rows read",
    "prefill_work": "their query times key positions",
    "blocks": "table entries",
    "new_blocks": "blocks taken",
    "copied_slots": "KV slots copied on write or at a fork",
    "freed_slots": "KV slots voided",
    "admitted_tokens": "prompt tokens of admitted requests: their identity is computed once",
}
"""Feature names with their meaning; the order is the column order."""

ATTENTION_FEATURES = (
    "decode_rows",
    "decode_steps",
    "decode_kv",
    "decode_padded_kv",
    "prefill_rows",
    "prefill_kv",
    "prefill_work",
)
"""What the attention kernels' own time depends on."""


def feature_index(names: Iterable[str]) -> list[int]:
    """Column numbers of `names`."""
    order = list(FEATURES)
    return [order.index(name) for name in names]


def step_features(plan: StepPlan, requests: Mapping[int, Request], block_size: int) -> list[float]:
    """Features of the plan's first (or only) step, in the order of FEATURES; `requests` by request id."""
    rows = plan.rows
    tokens = sum(row.query_len for row in rows)
    sampled = [row.request_id for row in rows if row.samples]
    decode = [row.context_len + 1 for row in rows if row.query_len == 1]
    chunks = [(row.query_len, row.context_len + row.query_len) for row in rows if row.query_len > 1]
    return [
        1.0,
        tokens,
        min(tokens, 8),
        min(tokens, 32),
        min(tokens, 128),
        len(rows),
        len(sampled),
        sum(requests[request_id].decoding is Decoding.BEAM for request_id in sampled),
        len(decode),
        bool(decode),
        sum(decode),
        len(decode) * max(decode, default=0),
        len(chunks),
        sum(kv for _, kv in chunks),
        sum(query * (kv - (query - 1) / 2) for query, kv in chunks),
        sum(-(-(row.context_len + row.query_len) // block_size) for row in rows),
        plan.new_blocks,
        len(plan.copies) * block_size,
        len(plan.frees) * block_size,
        sum(requests[request_id].prompt_tokens for request_id in plan.admitted),
    ]


def leap_features(
    plan: StepPlan, requests: Mapping[int, Request], block_size: int, steps: int
) -> list[Amount]:
    """Features of `steps` (at most `plan.repeat`) consecutive steps: arrays `[steps]` where they change, else numbers.

    In the steps after the first every row has one more token of context; the blocks they take and the cached blocks
    these evict follow from the plan, so that a fast-forward is priced exactly as single steps are.
    """
    features: list[Amount] = list(step_features(plan, requests, block_size))
    if steps == 1:
        return features
    later = np.arange(steps)
    grown = (len(plan.rows) * later).astype(np.float64)
    taken = _taken(plan, block_size, later)
    entries = np.cumsum(taken)
    voided = np.diff(np.maximum(0, entries - plan.usage.free // block_size), prepend=0)
    taken[0], voided[0] = plan.new_blocks, len(plan.frees)
    features[_DECODE_KV] = features[_DECODE_KV] + grown
    features[_PADDED_KV] = features[_PADDED_KV] + grown
    features[_BLOCKS] = features[_BLOCKS] + (entries if block_size > 1 else grown).astype(np.float64)
    features[_NEW] = taken.astype(np.float64)
    features[_FREED] = (voided * block_size).astype(np.float64)
    return features


def _taken(plan: StepPlan, block_size: int, later: IntArray) -> IntArray:
    """Blocks taken in each step after the first.

    With blocks of one token every row takes one a step, unless the rows are contiguous reservations: then not even
    the first step took any.
    """
    if block_size == 1 and not plan.new_blocks:
        return np.zeros(len(later), dtype=np.int64)
    taken: IntArray = ((plan.context_len + later[:, None]) % block_size == 0).sum(axis=1)
    taken[0] = 0
    return taken


_DECODE_KV, _PADDED_KV, _BLOCKS, _NEW, _FREED = feature_index(
    ("decode_kv", "decode_padded_kv", "blocks", "new_blocks", "freed_slots")
)
