"""Write paged caches: new tokens, block copies and swaps, one function each. `backend` chooses the code.

Caches are `[blocks, block_size, kv_heads, dim]` with a dense last axis and any other strides (NHD or
HND). K and V may differ in `dim`.
"""

from collections.abc import Sequence

import torch

from paged_kernels import checks
from paged_kernels.backends import Demand, choose_backend, resolve_backend
from paged_kernels.torch import cache as torch_cache

Pairs = torch.Tensor | Sequence[tuple[int, int]]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: str = "auto",
    validate: bool = True,
) -> None:
    """Write keys and values `[tokens, kv_heads, dim]` to slots (block x block_size + offset); slot -1 skips a token.

    An fp8 cache stores key / `k_scale` and value / `v_scale`, clamped to its range. `validate` checks the slots, which
    waits for the device (never during graph capture). Raises a `KernelError` before anything is written.
    """
    checks.check_caches(key_cache, value_cache)
    _check_rows("key", key, key_cache)
    _check_rows("value", value, value_cache)
    checks.check_scales(k_scale, v_scale)
    if validate:
        checks.check_slots(slot_mapping, key.shape[0], key_cache)
    arguments = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    demand = Demand.of(key, key_cache, value_cache)
    if choose_backend(backend, key_cache.device, demand).backend == "triton":
        from paged_kernels.triton import cache as triton_cache

        triton_cache.reshape_and_cache(*arguments)
    else:
        torch_cache.reshape_and_cache(*arguments)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_mapping: Pairs, *, backend: str = "auto"
) -> None:
    """Copy blocks `[n, 2]` (source, destination) of both caches; all sources are read before any write.

    A cache may be a stack of layers `[layers, blocks, block_size, kv_heads, dim]`: all layers are copied in one launch.
    A mapping on the host is checked, and needs no staging buffer if no destination is a source.
    """
    checks.check_same("key_cache", key_cache, "value_cache", value_cache)
    pairs = _pairs(block_mapping, key_cache.shape[-4], key_cache.shape[-4])
    if not len(pairs):
        return
    disjoint = pairs.device.type == "cpu" and not set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())
    source, destination = pairs.to(key_cache.device).long().unbind(1)
    if resolve_backend(backend, key_cache.device) == "triton":
        from paged_kernels.triton import cache as triton_cache

        if key_cache.shape == value_cache.shape and key_cache.stride() == value_cache.stride():
            triton_cache.copy_blocks(key_cache, source, destination, value_cache, disjoint=disjoint)
            return
        for cache in (key_cache, value_cache):
            triton_cache.copy_blocks(cache, source, destination, disjoint=disjoint)
    else:
        torch_cache.copy_blocks(key_cache, source, destination)
        torch_cache.copy_blocks(value_cache, source, destination)


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, block_mapping: Pairs) -> None:
    """Copy blocks `[n, 2]` (block of `source`, block of `destination`) between caches on different devices.

    Both have the same shape except for the number of blocks; stacks of layers are allowed. The mapping is on the host.
    With pinned host memory the copies are asynchronous: wait for the stream before the host reads what was swapped out.
    """
    if source.shape[:-4] != destination.shape[:-4] or source.shape[-3:] != destination.shape[-3:]:
        raise checks.ShapeError(
            f"source {tuple(source.shape)} and destination {tuple(destination.shape)} must agree in all but the "
            "number of blocks"
        )
    if source.dtype != destination.dtype:
        raise checks.DtypeError(
            f"source is {source.dtype} and destination {destination.dtype}; blocks are copied without conversion"
        )
    if isinstance(block_mapping, torch.Tensor) and block_mapping.device.type != "cpu":
        raise checks.DeviceError(
            f"block_mapping is on {block_mapping.device}; the host starts the copies: pass it on the CPU"
        )
    pairs = _pairs(block_mapping, source.shape[-4], destination.shape[-4])
    torch_cache.swap_blocks(source, destination, [(int(read), int(write)) for read, write in pairs.tolist()])


def _pairs(mapping: Pairs, sources: int, destinations: int) -> torch.Tensor:
    """The mapping as `[n, 2]`. Its values are checked if it is on the host, where reading them costs no wait."""
    pairs = mapping
    if not isinstance(pairs, torch.Tensor):
        pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise checks.ShapeError(
            f"block_mapping {tuple(pairs.shape)} must be [n, 2]: pairs of source and destination"
        )
    if pairs.device.type == "cpu" and len(pairs):
        low, high = pairs.min(0).values.tolist(), pairs.max(0).values.tolist()
        if min(low) < 0 or high[0] >= sources or high[1] >= destinations:
            raise checks.TableError(
                f"block_mapping reads blocks {low[0]} to {high[0]} of {sources} and writes {low[1]} to {high[1]} of "
                f"{destinations}"
            )
        if len(set(pairs[:, 1].tolist())) < len(pairs):
            raise checks.TableError(
                "block_mapping writes a destination twice; its content would be undefined"
            )
    return pairs


def _check_rows(name: str, rows: torch.Tensor, cache: torch.Tensor) -> None:
    if rows.dim() != 3 or rows.shape[1:] != cache.shape[2:]:
        raise checks.ShapeError(
            f"{name} {tuple(rows.shape)} must be [tokens, {cache.shape[2]}, {cache.shape[3]}]"
        )
    if cache.dtype.itemsize > 1:
        checks.check_same(name, rows, f"{name}_cache", cache)
    elif rows.device != cache.device:
        raise checks.DeviceError(f"{name} is on {rows.device} and its cache on {cache.device}")
