"""The features of a step: the physical quantities of a step plan, which every cost model prices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from engine.core.options import Decoding
from engine.core.plan import Row, StepPlan
from engine.core.request import Request
from harness.metrics.log import FloatArray, IntArray
from harness.replay.cost_model import Amount

T = TypeVar("T")


class StepFeatures(NamedTuple, Generic[T]):
    """One value for each feature of a step. The order is the column order in logs, fits and compiled code.

    To add a feature, add it here and in `FeatureMeter.first`. Compiled code writes it in `harness/compiled/pricing.py`
    if plain requests have it, and a cost model prices it by its name.
    """

    step: T  # 1: the floor of a step
    tokens: T  # query tokens: work of the dense layers
    tokens_to_2: T  # the same, at most 2: a matrix times a single vector is cheaper than times a few
    tokens_to_8: T  # query tokens, at most 8: small matrices do not cost in proportion
    tokens_to_32: T  # query tokens, at most 32
    tokens_to_128: T  # query tokens, at most 128
    tokens_beyond_128: T  # query tokens above 128: large ones leave the cache
    rows: T  # sequences in the batch: host work
    sampled_rows: T  # rows that meet the vocabulary projection
    # sampled rows whose token is drawn at random: a softmax and a draw over the whole vocabulary
    drawn_rows: T
    beam_rows: T  # sampled rows of beam groups: selection over the whole vocabulary
    beam_rows_to_16: T  # the same, at most 16: a selection among more rows costs less for each
    beam_steps: T  # 1 if there is such a row: the floor of the selection
    decode_rows: T  # rows of one token
    decode_steps: T  # 1 if there is such a row: the floor of decode attention
    decode_inputs: T  # the same for the rest of the step: the floor of preparing their inputs
    decode_kv: T  # KV slots that decode rows read
    # the same, blocks that several rows share counted once: they are in the caches already
    decode_distinct_kv: T
    decode_padded_kv: T  # decode rows times the longest of them: what a padded batch reads
    decode_padded_blocks: T  # the same in blocks: each is fetched on its own
    prefill_rows: T  # rows of more than one token: each is an attention call of its own
    prefill_tokens: T  # their query tokens
    prefill_kv: T  # KV slots that those rows read
    prefill_blocks: T  # the same in blocks
    prefill_work: T  # their query times key positions
    blocks: T  # table entries
    new_blocks: T  # blocks taken, but for those that swapped blocks come back to
    copied_slots: T  # KV slots copied on write or at a fork
    freed_slots: T  # KV slots voided
    swapped_slots: T  # KV slots moved between device and host
    swapped_blocks: T  # the same in blocks: each is a transfer of its own
    admitted_tokens: T  # prompt tokens of admitted requests: their identity is computed once
    # 1 right after a large prefill, a quarter less each step: caches are warm again only gradually
    after_prefill: T
    draft_passes: T  # forward passes of the draft model
    draft_tokens: T  # tokens that run through it
    draft_kv: T  # KV slots of its lane that those read
    # of decode_kv the slots outside of the model's window, which windowed layers do not read
    decode_unseen_kv: T
    prefill_unseen_kv: T  # of prefill_kv the same
    prefill_unseen_work: T  # of prefill_work the same


FEATURES = StepFeatures._fields
AT: StepFeatures[int] = StepFeatures(*range(len(FEATURES)))
"""The column number of each feature, by its name: `features[AT.tokens]`."""

ATTENTION_FEATURES = (
    "decode_rows", "decode_steps", "decode_kv", "decode_distinct_kv", "decode_padded_kv",
    "decode_padded_blocks", "prefill_rows", "prefill_tokens", "prefill_kv", "prefill_blocks",
    "prefill_work",
)  # fmt: skip
"""The features that the time of the attention kernels depends on."""


WARMING = 0.75  # measured on CPU: what is left of the slowdown after one more decode step
LARGE_PREFILL = 128  # tokens
_add, _largest = np.add.reduce, np.maximum.reduce
_NONE_ACCEPTED: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class Sight:
    """What windowed layers see of a sequence: the last `tokens` tokens, or those of a chunk of so many at a fixed place
    (`chunked`). Positions count from 0.
    """

    tokens: int
    chunked: bool = False

    def unseen_of(self, positions: IntArray) -> int:
        """`unseen`, summed over positions."""
        size = self.tokens
        edges = positions // size * size if self.chunked else np.maximum(positions + 1 - size, 0)
        return int(_add(edges))

    def growth(self, positions: IntArray, steps: int) -> IntArray:
        """How many more tokens each of `steps` steps does not see than the one before it, with a row at each position.

        The first is 0.
        """
        if self.chunked:
            grown = _turns(positions, self.tokens, steps) * self.tokens
        else:
            leaving = np.minimum(np.maximum(self.tokens - positions, 0), steps)
            grown = np.cumsum(np.bincount(leaving, minlength=steps + 1))[:steps]
        grown[0] = 0
        return grown


def unseen(position: int, window: int, chunked: int) -> int:
    """Tokens before `position` that the token there does not see in a window, or in a chunk of so many (`Sight`). In
    compiled code too.
    """
    return position // window * window if chunked else max(0, position + 1 - window)


def unseen_pairs(tokens: int, window: int, chunked: int) -> int:
    """Of the first `tokens` tokens the pairs of a token and one before it that it does not see."""
    if chunked:
        whole, rest = tokens // window, tokens % window
        return window * (window * (whole * (whole - 1) // 2) + whole * rest)
    beyond = max(0, tokens - window)
    return beyond * (beyond + 1) // 2


def _turns(positions: IntArray, size: int, steps: int) -> IntArray:
    """How many of the rows at `positions` reach a multiple of `size` in each of `steps` steps, int64 `[steps]`."""
    return np.resize(np.bincount(-positions % size, minlength=size), steps)


class FeatureMeter:
    """Computes the features of the steps of one replay: call `first` for each step plan, then `took` with its steps.

    It remembers how long ago the last large prefill was. On a CPU a prefill of a hundred tokens or more evicts the
    model's weights and the interpreter from the caches, and the next decode steps take up to twice their time.
    `requests` by request id may grow while the replay runs. `window` is that of the model's windowed layers.
    `page_slots` tells how many KV slots of the whole model have the bytes of some pages, where layers are in groups;
    None: each has those of a block.
    """

    def __init__(
        self,
        requests: Mapping[int, Request],
        block_size: int,
        window: Sight | None = None,
        page_slots: Callable[[Sequence[int]], float] | None = None,
    ) -> None:
        self._requests = requests
        self._page_slots = page_slots
        self._block_size = block_size
        self._window = window
        self._after_prefill = 0.0
        self._beams: set[int] = set()  # beam requests admitted so far
        self._drawn: set[int] = set()  # requests admitted so far whose tokens are drawn
        self._all_drawn = True  # whether those are all
        self._steady_ids: Sequence[int] | None = None  # of the last step, with their rows that are drawn
        self._steady_drawn = 0
        # whether a request with drafts was admitted: then every row runs through both models
        self._drafting = False

    def first(self, plan: StepPlan, accepted: Mapping[int, int] = _NONE_ACCEPTED) -> StepFeatures[Amount]:
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
        others, size = plan.other_rows, self._block_size
        sampled = plan.steady + sum(row.samples for row in others)
        drawn = self._drawn_rows(plan, others, sampled) if self._drawn else 0
        # rows are not checked while there are no beam groups
        beams = sum(row.samples and row.request_id in self._beams for row in others) if self._beams else 0
        count, kv, longest, chunks, chunk_tokens, chunk_kv, chunk_blocks, work, entries = _row_sums(
            plan, others, size
        )
        tokens, rows = count + chunk_tokens, count + chunks
        swapped = len(plan.swap_in) + len(plan.swap_out)
        copied_slots: Amount = len(plan.copies) * size
        swapped_slots: Amount = swapped * size
        if self._page_slots is not None:
            copied_slots = self._page_slots([page for page, _ in plan.copies])
            moved = [*(page for page, _ in plan.swap_out), *(page for _, page in plan.swap_in)]
            swapped_slots = self._page_slots(moved)
        passes, drafted, draft_kv = (
            _draft_features((rows, tokens, kv + chunk_kv), others, accepted) if self._drafting else (0, 0, 0)
        )
        unseen = _unseen_features(plan, self._window) if self._window else (0, 0, 0)
        return StepFeatures(
            step=1.0,
            tokens=tokens,
            tokens_to_2=tokens if tokens < 2 else 2,
            tokens_to_8=tokens if tokens < 8 else 8,
            tokens_to_32=tokens if tokens < 32 else 32,
            tokens_to_128=tokens if tokens < 128 else 128,
            tokens_beyond_128=tokens - 128 if tokens > 128 else 0,
            rows=rows,
            sampled_rows=sampled,
            drawn_rows=drawn,
            beam_rows=beams,
            beam_rows_to_16=beams if beams < 16 else 16,
            beam_steps=1 if beams else 0,
            decode_rows=count,
            decode_steps=1 if count else 0,
            decode_inputs=1 if count else 0,
            decode_kv=kv,
            decode_distinct_kv=kv * distinct_share(plan.usage.physical_blocks, plan.usage.logical_blocks),
            decode_padded_kv=count * longest,
            decode_padded_blocks=count * -(-longest // size),
            prefill_rows=chunks,
            prefill_tokens=chunk_tokens,
            prefill_kv=chunk_kv,
            prefill_blocks=chunk_blocks,
            prefill_work=work,
            blocks=entries,
            new_blocks=plan.new_blocks,
            copied_slots=copied_slots,
            freed_slots=len(plan.frees) * size,
            swapped_slots=swapped_slots,
            swapped_blocks=swapped,
            admitted_tokens=admitted,
            after_prefill=self._after_prefill,
            draft_passes=passes,
            draft_tokens=drafted,
            draft_kv=draft_kv,
            decode_unseen_kv=unseen[0],
            prefill_unseen_kv=unseen[1],
            prefill_unseen_work=unseen[2],
        )

    def single(self, plan: StepPlan, accepted: Mapping[int, int]) -> StepFeatures[Amount]:
        """Features of a plan that ran for one step."""
        features = self.first(plan, accepted)
        self.took(features)
        return features

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
        large = min(1.0, float(first[AT.prefill_tokens]) / LARGE_PREFILL)
        for _ in range(steps):
            self._after_prefill = self._after_prefill * WARMING + large


def _row_sums(
    plan: StepPlan, others: Sequence[Row], block_size: int
) -> tuple[int, int, int, int, int, int, int, float, int]:
    """Sums over the rows of a step: steady ones as an array, the others one by one.

    Of decode rows their number, KV slots and longest; of chunks their number, query tokens, KV slots, blocks and
    query-key pairs; of all rows their table entries.
    """
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
            chunks, chunk_tokens = chunks + 1, chunk_tokens + query
            chunk_kv, chunk_blocks = chunk_kv + end, chunk_blocks + blocks
            work += query * (end - (query - 1) / 2)
    return count, kv, longest, chunks, chunk_tokens, chunk_kv, chunk_blocks, work, entries


def distinct_share(physical: Amount, logical: Amount) -> Amount:
    """Distinct blocks over table entries, 1 where there are none; elementwise over arrays."""
    if isinstance(logical, np.ndarray):
        return physical / logical
    return physical / logical if logical else 1.0


def _unseen_features(plan: StepPlan, window: Sight) -> tuple[Amount, Amount, Amount]:
    """Slots of decode rows, slots of chunks, and query-key pairs of chunks, that lie outside of the window.

    The queries of a chunk together read the slots from the first one's window to the last one's position.
    """
    decode = window.unseen_of(plan.context_len[: plan.steady]) if plan.steady else 0
    chunk_kv, work, size, chunked = 0, 0, window.tokens, window.chunked
    for _, _, held, query, _, _, _ in plan.other_rows:
        if query == 1:
            decode += unseen(held, size, chunked)
        else:
            chunk_kv += unseen(held, size, chunked)
            work += unseen_pairs(held + query, size, chunked) - unseen_pairs(held, size, chunked)
    return decode, chunk_kv, work


def _draft_features(
    whole: tuple[int, int, int], others: Sequence[Row], accepted: Mapping[int, int]
) -> tuple[int, int, int]:
    """Passes, tokens and KV slots of the draft model's lane (`engine.runtime.runner`).

    `whole` are rows, tokens and KV slots of the step. Rows without drafts take one pass. Rows with drafts take a pass
    for each draft token, and one more where all of them were right.
    """
    plain, tokens, kv = whole
    longest = behind = 0
    for row in others:
        if row.drafts:
            passes = row.drafts + (accepted.get(row.request_id) == row.drafts)
            behind = max(behind, passes - row.drafts)
            longest = max(longest, row.drafts)
            plain, tokens = plain - 1, tokens - row.query_len + passes
            kv += passes * row.context_len + passes * (passes + 1) // 2 - row.context_len - row.query_len
    return (1 if plain else 0) + longest + behind, tokens, kv


class FastForwardFeatures:
    """Features of the steps of a fast-forward, whose rows are all steady decoders.

    `singles` gives them one by one as numbers, `columns` all at once as arrays. Both do the same operations in the same
    order, so the results are equal to the bit. `first` are the features of the first step.
    """

    def __init__(
        self, plan: StepPlan, first: Sequence[Amount], block_size: int, window: Sight | None = None
    ) -> None:
        self._first = first
        self._block_size = block_size
        self._rows = plan.steady
        self._longest = int(np.maximum.reduce(plan.context_len)) + 1
        self._unnamed = plan.usage.free // block_size
        self._physical, self._logical = plan.usage.physical_blocks, plan.usage.logical_blocks
        self._residues = self._crossings(plan)
        self._window, self._context = window, plan.context_len

    def _crossings(self, plan: StepPlan) -> list[int]:
        """Blocks taken in step j, at index j modulo the block size: rows whose context is then a multiple of it.

        With blocks of one token every row takes one block in each step. Contiguous reservations take none; the first
        step shows it.
        """
        if self._block_size == 1 and not plan.new_blocks:
            return [0]
        return list(_turns(plan.context_len, self._block_size, self._block_size).tolist())

    def singles(self, steps: int) -> Iterator[list[Amount]]:
        """Features of steps 1 … `steps - 1` one by one, as numbers."""
        size, rows, residues = self._block_size, self._rows, self._residues
        entries = gone = 0
        features = list(self._first)
        kv, blocks, draft_kv = features[AT.decode_kv], features[AT.blocks], features[AT.draft_kv]
        unseen = self._unseen(steps)
        for step in range(1, steps):
            taken = residues[step % size]
            entries += taken
            before, gone = gone, max(0, entries - self._unnamed)
            longest = self._longest + step
            features[AT.decode_kv] = kv + rows * step
            share = distinct_share(self._physical + entries, self._logical + entries)
            features[AT.decode_distinct_kv] = features[AT.decode_kv] * share
            features[AT.decode_padded_kv] = rows * longest
            features[AT.decode_padded_blocks] = rows * -(-longest // size)
            features[AT.draft_kv] = draft_kv + rows * step if draft_kv else 0
            features[AT.blocks] = blocks + (entries if size > 1 else rows * step)
            features[AT.new_blocks] = taken
            features[AT.freed_slots] = (gone - before) * size
            features[AT.copied_slots] = features[AT.admitted_tokens] = 0
            features[AT.after_prefill] = features[AT.after_prefill] * WARMING
            if unseen is not None:
                features[AT.decode_unseen_kv] = float(unseen[step])
            yield features

    def _unseen(self, steps: int) -> FloatArray | None:
        """KV slots outside of the window in steps 0 … `steps - 1`; None without a window."""
        if self._window is None:
            return None
        growth = self._window.growth(self._context, steps)
        return float(self._first[AT.decode_unseen_kv]) + np.cumsum(growth).astype(np.float64)

    def columns(self, steps: int) -> list[Amount]:
        """Features of steps 0 … `steps - 1`, those that change as arrays `[steps]`."""
        size, first, later = self._block_size, self._first, np.arange(steps)
        grown = (self._rows * later).astype(np.float64)
        taken = np.resize(np.array(self._residues, dtype=np.int64), steps)
        taken[0] = 0
        entries = np.cumsum(taken)
        voided = np.diff(np.maximum(0, entries - self._unnamed), prepend=0).astype(np.float64) * size
        taken[0], voided[0] = first[AT.new_blocks], first[AT.freed_slots]
        longest = self._longest + later
        features = list(first)
        features[AT.decode_kv] = first[AT.decode_kv] + grown
        held = entries.astype(np.float64)
        share = distinct_share(self._physical + held, self._logical + held)
        features[AT.decode_distinct_kv] = features[AT.decode_kv] * share
        features[AT.decode_padded_kv] = (self._rows * longest).astype(np.float64)
        features[AT.decode_padded_blocks] = (self._rows * -(-longest // size)).astype(np.float64)
        features[AT.blocks] = first[AT.blocks] + (entries if size > 1 else grown).astype(np.float64)
        features[AT.new_blocks] = taken.astype(np.float64)
        features[AT.freed_slots] = voided
        if first[AT.draft_kv]:
            features[AT.draft_kv] = first[AT.draft_kv] + grown
        for once in (AT.copied_slots, AT.admitted_tokens):
            features[once] = np.where(later == 0, first[once], 0.0) if first[once] else 0
        unseen = self._unseen(steps)
        if unseen is not None:
            features[AT.decode_unseen_kv] = unseen
        features[AT.after_prefill] = np.cumprod(
            np.concatenate([[first[AT.after_prefill]], np.full(steps - 1, WARMING)])
        )
        return features
