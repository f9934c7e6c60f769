"""torch's fused attention: on contiguous KV (no paging at all), and after a gather (paging without a paged kernel)."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels.providers.case import Case, Run, UnsupportedCaseError, contiguous_kv
from paged_kernels.scoring import additive, causal_window


@dataclass(frozen=True, slots=True)
class ContiguousSdpa:
    """SDPA on contiguous KV. Sequences of equal length run in one call, ragged prefills one by one."""

    name: str = "sdpa"
    capturable: bool = True

    def available(self, device: torch.device) -> str | None:
        """It is part of torch."""
        return None

    def prepare(self, case: Case) -> Run:
        """Copy KV into contiguous memory, and choose the call for which torch has its fastest kernel."""
        keys, values = (cache.to(case.q.dtype).transpose(1, 2) for cache in _laid_out(case))
        if case.decode:
            return partial(
                _decode, _packed(case), keys, values, _tail_mask(case, keys.shape[2]), case.scoring.scale
            )
        return partial(_prefill, case, keys, values)


@dataclass(frozen=True, slots=True)
class GatherSdpa:
    """Gather each sequence's blocks into contiguous memory, then SDPA: the cost of paging without a paged kernel."""

    name: str = "gather-sdpa"
    capturable: bool = True

    def available(self, device: torch.device) -> str | None:
        """It is part of torch."""
        return None

    def prepare(self, case: Case) -> Run:
        """Make the index and the buffers; the gather itself is timed."""
        _refuse_options(case)
        if not case.decode or case.key_cache.dtype.itemsize == 1:
            raise UnsupportedCaseError(
                f"{case.name}: gather + SDPA serves decodes of caches in the queries' dtype"
            )
        width = -(-max(case.lengths) // case.block_size)
        needed = torch.tensor([-(-length // case.block_size) for length in case.lengths], device=case.device)
        used = torch.arange(width, device=case.device) < needed.unsqueeze(1)
        blocks = torch.where(used, case.block_table[:, :width], 0).long().flatten()
        slots = torch.arange(width * case.block_size, device=case.device)
        void = (slots >= case.seq_lens.unsqueeze(1)).flatten().nonzero().squeeze(1)
        mask = _tail_mask(case, width * case.block_size)
        return partial(_gathered, case, blocks, void, mask, _packed(case))


def _laid_out(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    _refuse_options(case)
    keys, values = contiguous_kv(case)
    if keys.dtype.itemsize > 1:
        return keys, values
    return keys.float() * case.scoring.k_scale, values.float() * case.scoring.v_scale


def _refuse_options(case: Case) -> None:
    if not case.scoring.plain or 0 in case.lengths:
        raise UnsupportedCaseError(f"{case.name}: SDPA supports no softcap, sinks, ALiBi or empty sequences")


def _packed(case: Case) -> torch.Tensor:
    """Queries of a decode `[sequences, kv_heads, group, dk]`: the heads of a group share keys, so they become rows."""
    return case.q.view(len(case.q), case.kv_heads, -1, case.q.shape[2])


def _tail_mask(case: Case, width: int) -> torch.Tensor | None:
    """Additive mask `[sequences, 1, 1, width]`. None if every sequence is `width` long and sees all keys."""
    window = case.scoring.window
    if set(case.lengths) == {width} and not 0 < window < width:
        return None
    position, lengths = torch.arange(width, device=case.device), case.seq_lens.unsqueeze(1)
    visible = (position < lengths) & (position >= lengths - (window or width))
    return additive(visible, case.q.dtype)[:, None, None, :]


def _decode(
    packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return result.flatten(1, 2)


def _gathered(
    case: Case, blocks: torch.Tensor, void: torch.Tensor, mask: torch.Tensor | None, packed: torch.Tensor
) -> torch.Tensor:
    pair = []
    for cache in (case.key_cache, case.value_cache):
        found = cache.index_select(0, blocks).view(-1, *cache.shape[2:])
        found.index_fill_(0, void, 0.0)
        pair.append(found.view(len(case.lengths), -1, *cache.shape[2:]).transpose(1, 2))
    return _decode(packed, pair[0], pair[1], mask, case.scoring.scale)


def _prefill(case: Case, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if len(set(case.lengths)) == len(set(case.queries)) == 1:
        queries = case.q.view(len(case.lengths), case.queries[0], *case.q.shape[1:]).transpose(1, 2)
        result = _causal(case, queries, keys, values)
        return result.transpose(1, 2).reshape(len(case.q), case.heads, -1)
    parts, start = [], 0
    for row, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        queries = case.q[start : start + count].transpose(0, 1).unsqueeze(0)
        one = _causal(case, queries, keys[row : row + 1, :, :length], values[row : row + 1, :, :length])
        parts.append(one[0].transpose(0, 1))
        start += count
    return torch.cat(parts)


def _causal(case: Case, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[n, heads, queries, dv]`. On CUDA a whole prompt has a fused kernel, and so has a chunk without a window."""
    count, length, window = queries.shape[2], keys.shape[2], case.scoring.window
    mask: torch.Tensor | None = None
    if window or count < length:
        if not window and case.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(count, length)
        else:
            mask = additive(causal_window(count, length, window, device=case.device), case.q.dtype)
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=case.scoring.scale,
        enable_gqa=case.heads != case.kv_heads,
    )
