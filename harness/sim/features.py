"""What a step's plan says about its cost: the physical quantities that every cost model prices.

The same function serves a simulated and a measured step, and all steps of a fast-forward at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from engine.core.plan import Row, StepPlan
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
    "swapped_slots": "KV slots moved between device and host",
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
    the next decode steps take up to twice their time. `requests` by request id; it may grow while the replay runs.
    """

    def __init__(self, requests: Mapping[int, Request], block_size: int) -> None:
        self._requests = requests
        self._block_size = block_size
        self._after_prefill = 0.0
        self._beams: set[int] = set()  # beam requests admitted so far

    def features(self, plan: StepPlan, steps: int = 1) -> list[Amount]:
        """Features of the next `steps` (at most `plan.repeat`) steps: arrays `[steps]` where they change, else numbers.

        In the steps after the first every row has one more token of context; the blocks they take and the cached
        blocks these evict follow from the plan, so that a fast-forward is priced exactly as single steps are.
        """
        first = self.first(plan)
        return first if steps == 1 else Stretch(plan, first, self._block_size).columns(steps)

    def first(self, plan: StepPlan) -> list[Amount]:
        """Features of the plan's first (or only) step, as numbers."""
        admitted = 0
        for request_id in plan.admitted:
            request = self._requests[request_id]
            admitted += request.prompt_tokens
            if request.decoding is Decoding.BEAM:
                self._beams.add(request_id)
        others = plan.other_rows
        sampled = plan.steady + sum(row.samples for row in others)
        return [
            *_rows_features(plan, others, self._block_size, sampled, self._beam_rows(others)),
            plan.new_blocks,
            len(plan.copies) * self._block_size,
            len(plan.frees) * self._block_size,
            (len(plan.swap_in) + len(plan.swap_out)) * self._block_size,
            admitted,
            self._after_prefill,
        ]

    def _beam_rows(self, others: Sequence[Row]) -> int:
        """Sampled rows of beam groups; nothing is looked at while there are no such requests."""
        if not self._beams:
            return 0
        return sum(row.samples and row.request_id in self._beams for row in others)

    def took(self, first: Sequence[Amount], steps: int = 1) -> None:
        """`steps` steps of a plan were taken whose first had these features."""
        large = min(1.0, float(first[_PREFILL]) / _LARGE_PREFILL)
        for _ in range(steps):
            self._after_prefill = self._after_prefill * _WARMING + large


_WARMING = 0.75  # measured on CPU: what is left of the slowdown after one more decode step
_LARGE_PREFILL = 128  # tokens


def _rows_features(
    plan: StepPlan, others: Sequence[Row], block_size: int, sampled: int, beam_rows: int
) -> list[Amount]:
    """The features that follow from the rows of a step: steady ones as an array, the others one by one."""
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
        tokens if tokens < 8 else 8,
        tokens if tokens < 32 else 32,
        tokens if tokens < 128 else 128,
        tokens - 128 if tokens > 128 else 0,
        count + chunks,
        sampled,
        beam_rows,
        count,
        1 if count else 0,
        kv,
        count * longest,
        count * -(-longest // block_size),
        chunks,
        chunk_tokens,
        chunk_kv,
        chunk_blocks,
        work,
        entries,
    ]


class Stretch:
    """A fast-forward: features of its steps, from those of the first; all rows are steady decoders."""

    def __init__(self, plan: StepPlan, first: Sequence[Amount], block_size: int) -> None:
        self._first = first
        self._block_size = block_size
        self._rows = plan.steady
        self._longest = int(_largest(plan.context_len)) + 1
        self._unnamed = plan.usage.free // block_size
        self._residues = self._crossings(plan)

    def _crossings(self, plan: StepPlan) -> list[int]:
        """Blocks taken in step j, at index j modulo the block size: rows whose context is then a multiple of it.

        With blocks of one token every row takes one a step, unless the rows are contiguous reservations: then not
        even the first step took any.
        """
        if self._block_size == 1 and not plan.new_blocks:
            return [0]
        counts = np.bincount(-plan.context_len % self._block_size, minlength=self._block_size)
        return list(counts.tolist())

    def singles(self, steps: int) -> Iterator[list[Amount]]:
        """Features of steps 1 … `steps - 1` one by one, as numbers."""
        size, rows, residues = self._block_size, self._rows, self._residues
        entries = gone = 0
        features = list(self._first)
        kv, blocks = features[_DECODE_KV], features[_BLOCKS]
        for step in range(1, steps):
            taken = residues[step % size]
            entries += taken
            before, gone = gone, max(0, entries - self._unnamed)
            longest = self._longest + step
            features[_DECODE_KV] = kv + rows * step
            features[_PADDED_KV] = rows * longest
            features[_PADDED_BLOCKS] = rows * -(-longest // size)
            features[_BLOCKS] = blocks + (entries if size > 1 else rows * step)
            features[_NEW] = taken
            features[_FREED] = (gone - before) * size
            features[_COPIED] = features[_ADMITTED] = 0
            features[_AFTER] = features[_AFTER] * _WARMING
            yield features

    def columns(self, steps: int) -> list[Amount]:
        """Features of steps 0 … `steps - 1`, those that change as arrays `[steps]`."""
        size, first, later = self._block_size, self._first, np.arange(steps)
        grown = (self._rows * later).astype(np.float64)
        taken = np.resize(np.array(self._residues, dtype=np.int64), steps)
        taken[0] = 0
        entries = np.cumsum(taken)
        voided = np.diff(np.maximum(0, entries - self._unnamed), prepend=0).astype(np.float64) * size
        taken[0], voided[0] = first[_NEW], first[_FREED]
        longest = self._longest + later
        features = list(first)
        features[_DECODE_KV] = first[_DECODE_KV] + grown
        features[_PADDED_KV] = (self._rows * longest).astype(np.float64)
        features[_PADDED_BLOCKS] = (self._rows * -(-longest // size)).astype(np.float64)
        features[_BLOCKS] = first[_BLOCKS] + (entries if size > 1 else grown).astype(np.float64)
        features[_NEW] = taken.astype(np.float64)
        features[_FREED] = voided
        for once in (_COPIED, _ADMITTED):
            features[once] = np.where(later == 0, first[once], 0.0) if first[once] else 0
        features[_AFTER] = np.cumprod(np.concatenate([[first[_AFTER]], np.full(steps - 1, _WARMING)]))
        return features


_add, _largest = np.add.reduce, np.maximum.reduce
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
_PREFILL, _COPIED, _ADMITTED = feature_index(("prefill_tokens", "copied_slots", "admitted_tokens"))
