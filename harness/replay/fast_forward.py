"""Fast-forward: the features of many consecutive decode steps, from the features of the first one."""

from collections.abc import Iterator, Sequence

import numpy as np

from engine.core.plan import StepPlan
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount
from harness.replay.features import WARMING, distinct_share, feature_index

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
_COPIED, _ADMITTED, _DRAFT_KV, _DISTINCT_KV, _UNSEEN_KV = feature_index(
    ("copied_slots", "admitted_tokens", "draft_kv", "decode_distinct_kv", "decode_unseen_kv")
)


class FastForwardFeatures:
    """Features of the steps of a fast-forward, whose rows are all steady decoders.

    `singles` gives them one by one as numbers, `columns` all at once as arrays. Both do the same operations in the same
    order, so the results are equal to the bit. `first` are the features of the first step.
    """

    def __init__(
        self, plan: StepPlan, first: Sequence[Amount], block_size: int, window: int | None = None
    ) -> None:
        self._first = first
        self._block_size = block_size
        self._rows = plan.steady
        self._longest = int(np.maximum.reduce(plan.context_len)) + 1
        self._unnamed = plan.usage.free // block_size
        self._physical, self._logical = plan.usage.physical_blocks, plan.usage.logical_blocks
        self._residues = self._crossings(plan)
        # By row the first step after which one more of its slots lies outside of the window in each step.
        self._leaving = None if window is None else np.maximum(window - plan.context_len, 0)

    def _crossings(self, plan: StepPlan) -> list[int]:
        """Blocks taken in step j, at index j modulo the block size: rows whose context is then a multiple of it.

        With blocks of one token every row takes one block in each step. Contiguous reservations take none; the first
        step shows it.
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
        kv, blocks, draft_kv = features[_DECODE_KV], features[_BLOCKS], features[_DRAFT_KV]
        unseen = self._unseen(steps)
        for step in range(1, steps):
            taken = residues[step % size]
            entries += taken
            before, gone = gone, max(0, entries - self._unnamed)
            longest = self._longest + step
            features[_DECODE_KV] = kv + rows * step
            share = distinct_share(self._physical + entries, self._logical + entries)
            features[_DISTINCT_KV] = features[_DECODE_KV] * share
            features[_PADDED_KV] = rows * longest
            features[_PADDED_BLOCKS] = rows * -(-longest // size)
            features[_DRAFT_KV] = draft_kv + rows * step if draft_kv else 0
            features[_BLOCKS] = blocks + (entries if size > 1 else rows * step)
            features[_NEW] = taken
            features[_FREED] = (gone - before) * size
            features[_COPIED] = features[_ADMITTED] = 0
            features[_AFTER] = features[_AFTER] * WARMING
            if unseen is not None:
                features[_UNSEEN_KV] = float(unseen[step])
            yield features

    def _unseen(self, steps: int) -> FloatArray | None:
        """KV slots outside of the window in steps 0 … `steps - 1`; None without a window."""
        if self._leaving is None:
            return None
        growth = np.cumsum(np.bincount(np.minimum(self._leaving, steps), minlength=steps + 1))[:steps]
        growth[0] = 0
        return float(self._first[_UNSEEN_KV]) + np.cumsum(growth).astype(np.float64)

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
        held = entries.astype(np.float64)
        share = distinct_share(self._physical + held, self._logical + held)
        features[_DISTINCT_KV] = features[_DECODE_KV] * share
        features[_PADDED_KV] = (self._rows * longest).astype(np.float64)
        features[_PADDED_BLOCKS] = (self._rows * -(-longest // size)).astype(np.float64)
        features[_BLOCKS] = first[_BLOCKS] + (entries if size > 1 else grown).astype(np.float64)
        features[_NEW] = taken.astype(np.float64)
        features[_FREED] = voided
        if first[_DRAFT_KV]:
            features[_DRAFT_KV] = first[_DRAFT_KV] + grown
        for once in (_COPIED, _ADMITTED):
            features[once] = np.where(later == 0, first[once], 0.0) if first[once] else 0
        unseen = self._unseen(steps)
        if unseen is not None:
            features[_UNSEEN_KV] = unseen
        features[_AFTER] = np.cumprod(np.concatenate([[first[_AFTER]], np.full(steps - 1, WARMING)]))
        return features
