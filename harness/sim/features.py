"""What a step's plan says about its cost: the physical quantities that every cost model prices.

The same function serves a simulated and a measured step, and all steps of a fast-forward at once.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from engine.core.plan import StepPlan
from engine.core.request import Decoding, Request

FloatArray = npt.NDArray[np.float64]

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


def leap_features(plan: StepPlan, requests: Mapping[int, Request], block_size: int, steps: int) -> FloatArray:
    """Features of `steps` (at most `plan.repeat`) consecutive steps, float64 `[steps, len(FEATURES)]`.

    In the steps after the first every row has one more token of context; the blocks they take and the cached blocks
    these evict follow from the plan, so that a fast-forward is priced exactly as single steps are.
    """
    table = np.tile(np.array(step_features(plan, requests, block_size), dtype=np.float64), (steps, 1))
    if steps == 1:
        return table
    later = np.arange(1, steps)
    table[1:, _DECODE_KV] += len(plan.rows) * later
    table[1:, _PADDED_KV] += len(plan.rows) * later
    table[1:, _MOVED] = 0.0
    if block_size > 1:  # a contiguous reservation takes nothing, and reads one table entry a token
        kv = plan.context_len + later[:, None]  # [steps - 1, rows], before the step's own token
        taken = (kv % block_size == 0).sum(axis=1)
        evicted = np.maximum(0, np.cumsum(taken) - plan.usage.free // block_size)
        table[1:, _BLOCKS] += np.cumsum(taken)
        table[1:, _NEW] = taken
        table[1:, _FREED] = np.diff(evicted, prepend=0) * block_size
    else:
        table[1:, _BLOCKS] += len(plan.rows) * later
    return table


_DECODE_KV, _PADDED_KV, _BLOCKS, _NEW, _FREED = feature_index(
    ("decode_kv", "decode_padded_kv", "blocks", "new_blocks", "freed_slots")
)
_MOVED = feature_index(("new_blocks", "copied_slots", "freed_slots", "admitted_tokens"))
