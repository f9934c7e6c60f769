"""What a step's plan says about its cost: the physical quantities that every cost model prices.

The same function serves a simulated and a measured step, and all steps of a fast-forward at once.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from engine.core.plan import IntArray, StepPlan
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


def step_features(
    plan: StepPlan, requests: Mapping[int, Request], block_size: int, steps: int = 1
) -> FloatArray:
    """Features of `steps` (at most `plan.repeat`) consecutive steps, float64 `[steps, len(FEATURES)]`.

    `requests` maps request ids to requests. In the steps after the first every row has one more token of context; the
    blocks they take and the cached blocks these evict follow from the plan, so that a fast-forward is priced exactly
    as single steps are.
    """
    query, context = plan.query_len, plan.context_len
    kv = context + query + np.arange(steps)[:, None]  # [steps, rows]
    out = np.zeros((steps, len(FEATURES)))
    tokens = float(query.sum())
    out[:, :6] = (1.0, tokens, min(tokens, 8.0), min(tokens, 32.0), min(tokens, 128.0), len(query))
    sampled = [requests[row.request_id].decoding is Decoding.BEAM for row in plan.rows if row.samples]
    out[:, 6:8] = len(sampled), sum(sampled)
    _attention(out[:, 8:15], query, kv)
    _pool(out[:, 15:19], plan, context, kv, block_size)
    out[0, 19] = sum(requests[request_id].prompt_tokens for request_id in plan.admitted)
    return out


def _attention(out: FloatArray, query: IntArray, kv: IntArray) -> None:
    """The columns `decode_rows` to `prefill_work`."""
    decode = query == 1
    rows = int(decode.sum())
    if rows:
        read = kv[:, decode]
        out[:, 0], out[:, 1] = rows, 1.0
        out[:, 2], out[:, 3] = read.sum(axis=1), rows * read.max(axis=1)
    if rows < len(query):
        chunk, chunk_kv = query[~decode], kv[:, ~decode]
        out[:, 4], out[:, 5] = len(chunk), chunk_kv.sum(axis=1)
        out[:, 6] = (chunk * (chunk_kv - (chunk - 1) / 2)).sum(axis=1)


def _pool(out: FloatArray, plan: StepPlan, context: IntArray, kv: IntArray, block_size: int) -> None:
    """The columns `blocks` to `freed_slots`: what a later step takes and evicts follows from the first."""
    steps = len(kv)
    out[:, 0] = (-(-kv // block_size)).sum(axis=1)
    out[0, 1:] = plan.new_blocks, len(plan.copies) * block_size, len(plan.frees) * block_size
    if steps > 1 and block_size > 1:  # a contiguous reservation takes nothing
        taken = ((context + np.arange(1, steps)[:, None]) % block_size == 0).sum(axis=1)
        evicted = np.maximum(0, np.cumsum(taken) - plan.usage.free // block_size)
        out[1:, 1], out[1:, 3] = taken, np.diff(evicted, prepend=0) * block_size
