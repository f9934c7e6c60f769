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
    "tokens_beyond_128": "query tokens above 128: large ones leave the cache",
    "rows": "sequences in the batch: host work",
    "sampled_rows": "rows that meet the vocabulary projection",
    "beam_rows": "sampled rows of beam groups: selection over the whole vocabulary",
    "decode_rows": "rows of one token",
    "decode_steps": "1 if there is such a row: the floor of decode attention",
    "decode_kv": "KV slots that decode rows read",
    "decode_padded_kv": "decode rows times the longest of them: what a padded batch reads",
    "decode_padded_blocks": "the same in blocks: each is fetched on its own",
    "prefill_rows": "rows of more than one token: each is an attention call of its own",
    "prefill_tokens": "their query tokens",
    "prefill_kv": "KV slots that those rows read",
    "prefill_blocks": "the same in blocks",
    "prefill_work": "their query times key positions",
    "blocks": "table entries",
    "new_blocks": "blocks taken",
    "copied_slots": "KV slots copied on write or at a fork",
    "freed_slots": "KV slots voided",
    "admitted_tokens": "prompt tokens of admitted requests: their identity is computed once",
    "after_prefill": "1 right after a large prefill, a quarter less each step: caches are warm again only gradually",
}
"""Feature names with their meaning; the order is the column order."""

ATTENTION_FEATURES = (
    "decode_rows",
    "decode_steps",
    "decode_kv",
    "decode_padded_kv",
    "decode_padded_blocks",
    "prefill_rows",
    "prefill_tokens",
    "prefill_kv",
    "prefill_blocks",
    "prefill_work",
)
"""What the attention kernels' own time depends on."""


def feature_index(names: Iterable[str]) -> list[int]:
    """Column numbers of `names`."""
    order = list(FEATURES)
    return [order.index(name) for name in names]


class FeatureMeter:
    """Features of the steps of one replay, in order; remembers how long ago the last large prefill was.

    On a CPU a prefill of a hundred tokens and more drives the model's weights and the interpreter out of the caches:
    the next decode steps take up to twice their time. `requests` by request id.
    """

    def __init__(self, requests: Mapping[int, Request], block_size: int) -> None:
        self._requests = requests
        self._block_size = block_size
        self._after_prefill = 0.0

    def features(self, plan: StepPlan, steps: int = 1) -> list[Amount]:
        """Features of the next `steps` (at most `plan.repeat`) steps: arrays `[steps]` where they change, else numbers.

        In the steps after the first every row has one more token of context; the blocks they take and the cached
        blocks these evict follow from the plan, so that a fast-forward is priced exactly as single steps are.
        """
        features: list[Amount] = list(_step_features(plan, self._requests, self._block_size))
        features.append(self._after_prefill)
        return features if steps == 1 else _stretched(features, plan, self._block_size, steps)

    def took(self, plan: StepPlan, steps: int = 1) -> None:
        """`steps` of the plan were taken."""
        tokens = sum(row.query_len for row in plan.rows if row.query_len > 1)
        for _ in range(steps):
            self._after_prefill = self._after_prefill * _WARMING + min(1.0, tokens / _LARGE_PREFILL)


_WARMING = 0.75  # measured on CPU: what is left of the slowdown after one more decode step
_LARGE_PREFILL = 128  # tokens


def _step_features(plan: StepPlan, requests: Mapping[int, Request], block_size: int) -> list[float]:
    """The features that follow from the plan's first (or only) step alone."""
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
        max(tokens - 128, 0),
        len(rows),
        len(sampled),
        sum(requests[request_id].decoding is Decoding.BEAM for request_id in sampled),
        len(decode),
        bool(decode),
        sum(decode),
        len(decode) * max(decode, default=0),
        len(decode) * -(-max(decode, default=0) // block_size),
        len(chunks),
        sum(query for query, _ in chunks),
        sum(kv for _, kv in chunks),
        sum(-(-kv // block_size) for _, kv in chunks),
        sum(query * (kv - (query - 1) / 2) for query, kv in chunks),
        sum(-(-(row.context_len + row.query_len) // block_size) for row in rows),
        plan.new_blocks,
        len(plan.copies) * block_size,
        len(plan.frees) * block_size,
        sum(requests[request_id].prompt_tokens for request_id in plan.admitted),
    ]


def _stretched(features: list[Amount], plan: StepPlan, block_size: int, steps: int) -> list[Amount]:
    """The features of a stretch of decode steps, from those of its first."""
    later = np.arange(steps)
    grown = (len(plan.rows) * later).astype(np.float64)
    taken = _taken(plan, block_size, later)
    entries = np.cumsum(taken)
    voided = np.diff(np.maximum(0, entries - plan.usage.free // block_size), prepend=0)
    taken[0], voided[0] = plan.new_blocks, len(plan.frees)
    features[_DECODE_KV] = features[_DECODE_KV] + grown
    longest = 1 + int(plan.context_len.max()) + later
    features[_PADDED_KV] = (len(plan.rows) * longest).astype(np.float64)
    features[_PADDED_BLOCKS] = (len(plan.rows) * -(-longest // block_size)).astype(np.float64)
    features[_BLOCKS] = features[_BLOCKS] + (entries if block_size > 1 else grown).astype(np.float64)
    features[_NEW] = taken.astype(np.float64)
    features[_FREED] = (voided * block_size).astype(np.float64)
    features[_AFTER] = np.cumprod(np.concatenate([[features[_AFTER]], np.full(steps - 1, _WARMING)]))
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


_DECODE_KV, _PADDED_KV, _PADDED_BLOCKS, _BLOCKS, _NEW, _FREED, _AFTER = feature_index(
    (
        "decode_kv",
        "decode_padded_kv",
        "decode_padded_blocks",
        "blocks",
        "new_blocks",
        "freed_slots",
        "after_prefill",
    )
)
