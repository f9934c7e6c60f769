"""One step's paged KV as the model's layers see it: write the new K and V, then attend over the pool."""

from collections.abc import Mapping
from typing import Any

import torch

from engine.runtime.kernels import AttentionPlan
from engine.runtime.kv_pool import KVPool
from engine.runtime.spans import Spans
from paged_kernels import Scoring


class PagedStep:
    """Handed to the model as `paged=`; its layers call `attend`. Index tensors are shared by all layers."""

    def __init__(self, plan: AttentionPlan, slots: torch.Tensor, pool: KVPool, spans: Spans) -> None:
        self._plan = plan
        self._slots = slots
        self._pool = pool
        self._spans = spans

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer: `[1, heads, tokens, d]` in, `[1, tokens, heads, d]` out.

        All rows are written before any is read: a sequence may share a block that another fills in this very step.
        """
        began = self._spans.begin()
        keys, values = self._pool.keys[module.layer_idx], self._pool.values[module.layer_idx]
        if module.layer_idx == 0 and self._pool.marks is not None:
            self._pool.marks.write(self._slots)
        self._plan.store(keys, key[0].transpose(0, 1), self._slots)
        self._plan.store(values, value[0].transpose(0, 1), self._slots)
        q = query[0].transpose(0, 1)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[3])
        self._plan.attend(q, keys, values, scoring, out)
        self._spans.end(began)
        return out.unsqueeze(0)
