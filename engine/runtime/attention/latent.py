"""Latent attention (MLA) on its latent vectors: what a layer would expand into K and V is stored as it is.

A latent layer of transformers (from 5.0 on) expands its compressed vectors by its method `expand_kv(latent, rotary)`,
and hands the result to its attention. While `latents` is open, the layer hands over the latent vectors `[1, 1, tokens,
rank]` as K and the rotary keys `[1, 1, tokens, rope_dim]` as V instead. They are stored in pages, and `LatentStep`
expands those of each sequence, by the layer's own method, where they are read. So a page has `rank + rope_dim` numbers
a token, as DeepSeek's cache has. Without `latents` the engine keeps expanded K and V.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from engine.core.plan import IntArray
from engine.runtime.attention.layer import AttentionTimer
from engine.runtime.attention.metadata import PrefillRow, StepLayout
from engine.runtime.errors import ModelError
from engine.runtime.kv_pool import CacheTensors
from paged_kernels import Scoring
from paged_kernels.scoring import causal_window
from paged_kernels.torch import cache as torch_cache

_METHOD = "expand_kv"


def latent_layers(model: Any) -> list[Any]:
    """The attention modules of a model that expand latent vectors themselves."""
    return [module for module in model.modules() if callable(getattr(type(module), _METHOD, None))]


@contextmanager
def latents(model: Any) -> Iterator[None]:
    """While this is open, latent layers hand their latent vectors to the attention."""
    modules = latent_layers(model)
    for module in modules:
        setattr(module, _METHOD, _as_they_are)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _METHOD)


def _as_they_are(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotary


def expand(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[1, heads, tokens, dk]` and V `[1, heads, tokens, dv]` by the layer's own method, hidden or not."""
    keys, values = getattr(type(module), _METHOD)(module, latent, rotary)
    return keys, values


class LatentStep:
    """The latent layers of one step: stores latent vectors in pages, and attends to what they expand to.

    The rows are those of `layout`, in the tensors of `pool`; `slots` `[tokens]` are the slots of the new tokens.
    """

    def __init__(
        self, layout: StepLayout, slots: torch.Tensor, pool: CacheTensors, timer: AttentionTimer
    ) -> None:
        self._slots, self._pool, self._timer = slots, pool, timer
        singles = [
            PrefillRow(table, number, 1, int(length))
            for number, (table, length) in enumerate(zip(layout.tables, layout.lengths, strict=True))
        ]
        self._rows = [*singles, *layout.prefills]
        read = [_slots_of(row, pool.block_size) for row in self._rows]
        slots_read = torch.from_numpy(np.concatenate(read)).to(pool.device)
        self._read = slots_read // pool.block_size, slots_read % pool.block_size

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attention of one latent layer; see `PagedStep.attend`. `key` and `value` are latents and rotary keys."""
        began = self._timer.begin()
        stored = self._pool.keys[module.layer_idx], self._pool.values[module.layer_idx]
        for cache, new in zip(stored, (key, value), strict=True):
            torch_cache.store(cache, new[0].transpose(0, 1), self._slots)
        latent, rotary = (cache[*self._read, 0][None, None] for cache in stored)
        keys, values = expand(module, latent, rotary)
        parts, first = [], 0
        for _, start, queries, length in self._rows:
            parts.append(
                _attend_row(
                    query[:, :, start : start + queries],
                    keys[:, :, first : first + length],
                    values[:, :, first : first + length],
                    scoring,
                )
            )
            first += length
        self._timer.end(began)
        return torch.cat(parts, dim=2).transpose(1, 2)


def _slots_of(row: PrefillRow, block_size: int) -> IntArray:
    """The slots of all tokens of a row's sequence."""
    positions = np.arange(row.length)
    slots: IntArray = row.table[positions // block_size] * block_size + positions % block_size
    return slots


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """The queries of one row, the last tokens of its keys: `[1, heads, queries, dv]`."""
    if not scoring.plain:
        raise ModelError("a latent layer with a softcap, sinks or ALiBi is not served")
    queries, length = query.shape[2], keys.shape[2]
    mask = causal_window(queries, length, scoring.window, device=query.device)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scoring.scale)
