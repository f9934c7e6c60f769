"""One step's paged KV as the model's layers see it: write the new K and V, then attend over the pool."""

from collections.abc import Mapping
from typing import Any

import torch

from engine.runtime.batch import StepBatch
from engine.runtime.kv_pool import KVPool
from engine.runtime.spans import Spans
from paged_kernels import Scoring, Workspace
from paged_kernels.torch_cache import store
from paged_kernels.torch_decode import run_decode
from paged_kernels.torch_prefill import run_prefill


class PagedStep:
    """Handed to the model as `paged=`; its layers call `attend`. Index tensors are shared by all layers."""

    def __init__(self, batch: StepBatch, pool: KVPool, workspace: Workspace, spans: Spans) -> None:
        self._batch = batch
        self._pool = pool
        self._workspace = workspace
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
        store(keys, key[0].transpose(0, 1), self._batch.slots)
        store(values, value[0].transpose(0, 1), self._batch.slots)
        q = query[0].transpose(0, 1)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[3])
        if self._batch.decode is not None:
            rows = slice(0, self._batch.decode_rows)
            run_decode(self._batch.decode, q[rows], keys, values, scoring, out[rows], self._workspace)
        for chunk in self._batch.prefills:
            run_prefill(chunk, q, keys, values, scoring, out, self._workspace)
        self._spans.end(began)
        return out.unsqueeze(0)
