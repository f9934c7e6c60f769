"""The features of a step: the physical quantities of a step plan, which every cost model prices."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from engine.core.options import Decoding
from engine.core.plan import Row, StepPlan
from engine.core.request import Request
from harness.replay.cost_model import Amount

FEATURES: dict[str, str] = {
    "step": "1: the floor of a step",
    "tokens": "query tokens: work of the dense layers",
    "tokens_to_2": "the same, at most 2: a matrix times a single vector is cheaper than times a few",
    "tokens_to_8": "query tokens, at most 8: small matrices do not cost in proportion",
    "tokens_to_32": "query tokens, at most 32",
    "tokens_to_128": "query tokens, at most 128",
    "tokens_beyond_128": "query tokens above 128: large ones leave the cache",
    "rows": "sequences in the batch: host work",
    "sampled_rows": "rows that meet the vocabulary projection",
    "drawn_rows": "sampled rows whose token is drawn at random: a softmax and a draw over the whole vocabulary",
    "beam_rows": "sampled rows of beam groups: selection over the whole vocabulary",
    "beam_rows_to_16": "the same, at most 16: a selection among more rows costs less for each",
    "beam_steps": "1 if there is such a row: the floor of the selection",
    "decode_rows": "rows of one token",
    "decode_steps": "1 if there is such a row: the floor of decode attention",
    "decode_inputs": "the same for the rest of the step: the floor of preparing their inputs",
    "decode_kv": "KV slots that decode rows read",
    "decode_distinct_kv": "the same, blocks that several rows share counted once: they are in the caches already",
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
    "swapped_slots": "KV slots moved between device and host",
    "swapped_blocks": "the same in blocks: each is a transfer of its own",
    "admitted_tokens": "prompt tokens of admitted requests: their identity is computed once",
    "after_prefill": "1 right after a large prefill, a quarter less each step: caches are warm again only gradually",
    "draft_passes": "forward passes of the draft model",
    "draft_tokens": "tokens that run through it",
    "draft_kv": "KV slots of its lane that those read",
    "decode_unseen_kv": "of decode_kv the slots outside of the model's window, which windowed layers do not read",
    "prefill_unseen_kv": "of prefill_kv the same",
    "prefill_unseen_work": "of prefill_work the same",
}
"""Feature names with their meaning; the order is the column order."""

ATTENTION_FEATURES = (
    "decode_rows",
    "decode_steps",
    "decode_kv",
    "decode_distinct_kv",
    "decode_padded_kv",
    "decode_padded_blocks",
    "prefill_rows",
    "prefill_tokens",
    "prefill_kv",
    "prefill_blocks",
    "prefill_work",
)
"""The features that the time of the attention kernels depends on."""


def feature_index(names: Iterable[str]) -> list[int]:
    """Column numbers of `names`."""
    order = list(FEATURES)
    return [order.index(name) for name in names]


WARMING = 0.75  # measured on CPU: what is left of the slowdown after one more decode step
LARGE_PREFILL = 128  # tokens
_add, _largest = np.add.reduce, np.maximum.reduce
_ROWS, _TOKENS, _DECODE_KV, _PREFILL_KV, _PREFILL = feature_index(
    ("rows", "tokens", "decode_kv", "prefill_kv", "prefill_tokens")
)
_NONE_ACCEPTED: Mapping[int, int] = MappingProxyType({})


class FeatureMeter:
    """Computes the features of the steps of one replay: call `first` for each step plan, then `took` with its steps.

    It remembers how long ago the last large prefill was. On a CPU a prefill of a hundred tokens or more evicts the
    model's weights and the interpreter from the caches, and the next decode steps take up to twice their time.
    `requests` by request id may grow while the replay runs. `window` is that of the model's windowed layers, in tokens.
    """

    def __init__(self, requests: Mapping[int, Request], block_size: int, window: int | None = None) -> None:
        self._requests = requests
        self._block_size = block_size
        self._window = window
        self._after_prefill = 0.0
        self._beams: set[int] = set()  # beam requests admitted so far
        self._drawn: set[int] = set()  # requests admitted so far whose tokens are drawn
        self._all_drawn = True  # whether those are all
        self._steady_ids: Sequence[int] | None = None  # of the last step, with their rows that are drawn
        self._steady_drawn = 0
        self._drafting = (
            False  # whether a request with drafts was admitted: then every row runs through both models
        )

    def first(self, plan: StepPlan, accepted: Mapping[int, int] = _NONE_ACCEPTED) -> list[Amount]:
        """Features of the plan's first (or only) step, as numbers; `accepted` drafts by request."""
        admitted = 0
        for request_id in plan.admitted:
            request = self._requests[request_id]
            admitted += request.prompt_tokens
            if request.decoding is Decoding.beam:
                self._beams.add(request_id)
            if request.decoding is Decoding.sample:
                self._drawn.add(request_id)
            else:
                self._all_drawn = False
            self._drafting = self._drafting or request.speculation is not None
        others = plan.other_rows
        sampled = plan.steady + sum(row.samples for row in others)
        drawn = self._drawn_rows(plan, others, sampled) if self._drawn else 0
        rows = _rows_features(plan, others, self._block_size, (sampled, drawn, self._beam_rows(others)))
        swapped = len(plan.swap_in) + len(plan.swap_out)
        return [
            *rows,
            plan.new_blocks,
            len(plan.copies) * self._block_size,
            len(plan.frees) * self._block_size,
            swapped * self._block_size,
            swapped,
            admitted,
            self._after_prefill,
            *(_draft_features(rows, others, accepted) if self._drafting else (0, 0, 0)),
            *(_unseen_features(plan, self._window) if self._window else (0, 0, 0)),
        ]

    def _beam_rows(self, others: Sequence[Row]) -> int:
        """Sampled rows of beam groups; rows are not checked while there are no such requests."""
        if not self._beams:
            return 0
        return sum(row.samples and row.request_id in self._beams for row in others)

    def _drawn_rows(self, plan: StepPlan, others: Sequence[Row], sampled: int) -> int:
        """Sampled rows whose token is drawn; steady rows are looked at again only where they have changed."""
        if self._all_drawn:
            return sampled
        if plan.steady_ids is not self._steady_ids:
            self._steady_ids = plan.steady_ids
            self._steady_drawn = sum(row.request_id in self._drawn for row in plan.rows[: plan.steady])
        return self._steady_drawn + sum(row.samples and row.request_id in self._drawn for row in others)

    def took(self, first: Sequence[Amount], steps: int = 1) -> None:
        """Record that `steps` steps of a plan ran; `first` are the features of the first."""
        large = min(1.0, float(first[_PREFILL]) / LARGE_PREFILL)
        for _ in range(steps):
            self._after_prefill = self._after_prefill * WARMING + large


def _rows_features(
    plan: StepPlan, others: Sequence[Row], block_size: int, chosen: tuple[int, int, int]
) -> list[Amount]:
    """The features that follow from the rows of a step: steady ones as an array, the others one by one.

    `chosen` are the rows that are sampled, and of these the drawn ones and those of beams.
    """
    sampled, drawn, beam_rows = chosen
    count = plan.steady
    kv = longest = entries = 0
    if count:
        context = plan.context_len[:count] if others else plan.context_len
        kv, longest = int(_add(context)) + count, int(_largest(context)) + 1
        entries = int(_add(context // block_size)) + count
    chunks = chunk_tokens = chunk_kv = chunk_blocks = 0
    work = 0.0
    for _, _, held, query, _, _, _ in others:
        end = held + query
        blocks = -(-end // block_size)
        entries += blocks
        if query == 1:
            count, kv, longest = count + 1, kv + end, max(longest, end)
        else:
            chunks, chunk_tokens, chunk_kv, chunk_blocks = (
                chunks + 1,
                chunk_tokens + query,
                chunk_kv + end,
                chunk_blocks + blocks,
            )
            work += query * (end - (query - 1) / 2)
    tokens = count + chunk_tokens
    return [
        1.0,
        tokens,
        tokens if tokens < 2 else 2,
        tokens if tokens < 8 else 8,
        tokens if tokens < 32 else 32,
        tokens if tokens < 128 else 128,
        tokens - 128 if tokens > 128 else 0,
        count + chunks,
        sampled,
        drawn,
        beam_rows,
        beam_rows if beam_rows < 16 else 16,
        1 if beam_rows else 0,
        count,
        1 if count else 0,
        1 if count else 0,
        kv,
        kv * distinct_share(plan.usage.physical_blocks, plan.usage.logical_blocks),
        count * longest,
        count * -(-longest // block_size),
        chunks,
        chunk_tokens,
        chunk_kv,
        chunk_blocks,
        work,
        entries,
    ]


def distinct_share(physical: Amount, logical: Amount) -> Amount:
    """Distinct blocks over table entries, 1 where there are none; elementwise over arrays."""
    if isinstance(logical, np.ndarray):
        return physical / logical
    return physical / logical if logical else 1.0


def _unseen_features(plan: StepPlan, window: int) -> tuple[Amount, Amount, Amount]:
    """Slots of decode rows, slots of chunks, and query-key pairs of chunks, that lie outside of the window.

    A query at position p sees the last `window` of its p keys. The queries of a chunk together read the slots from the
    first one's window to the last one's position.
    """
    decode = chunk_kv = work = 0
    if plan.steady:
        decode = int(_add(np.maximum(plan.context_len[: plan.steady] + 1 - window, 0)))
    for _, _, held, query, _, _, _ in plan.other_rows:
        beyond = max(0, held + query - window)
        if query == 1:
            decode += beyond
        else:
            chunk_kv += max(0, beyond - (query - 1))
            before = max(0, held - window)
            work += (beyond * (beyond + 1) - before * (before + 1)) // 2
    return decode, chunk_kv, work


def _draft_features(
    rows: Sequence[Amount], others: Sequence[Row], accepted: Mapping[int, int]
) -> tuple[Amount, Amount, Amount]:
    """Passes, tokens and KV slots of the draft model's lane (`engine.runtime.drafts`).

    Rows without drafts take one pass. Rows with drafts take a pass for each draft token, and one more where all of
    them were right.
    """
    plain, tokens = rows[_ROWS], rows[_TOKENS]
    kv = rows[_DECODE_KV] + rows[_PREFILL_KV]
    longest = behind = 0
    for row in others:
        if row.drafts:
            passes = row.drafts + (accepted.get(row.request_id) == row.drafts)
            behind = max(behind, passes - row.drafts)
            longest = max(longest, row.drafts)
            plain, tokens = plain - 1, tokens - row.query_len + passes
            kv += passes * row.context_len + passes * (passes + 1) // 2 - row.context_len - row.query_len
    return (1 if plain else 0) + longest + behind, tokens, kv
