"""Builds the parts of an engine from its options: limits, size of the KV pool, scheduler, runner."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.core.errors import CoreError
from engine.core.memory.group_layout import GroupLayout, LayerSet, separate_layout, uniform_layout
from engine.core.memory.grouped import GroupedManager, pages_of
from engine.core.options import CachePolicy, GroupKind, GroupPages, SchedulerLimits, WindowHits
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.attention.select import engine_backend
from engine.runtime.errors import ModelError
from engine.runtime.graphs import GraphOptions
from engine.runtime.group_views import state_bytes
from engine.runtime.kv_pool import kv_item_bytes
from engine.runtime.models.cpu_layers import can_pack, is_small, replace_layers
from engine.runtime.models.load import LoadedModel
from engine.runtime.options import EngineOptions, MakeScheduler, build_manager
from engine.runtime.runner import Runner

GIB = 1 << 30
CPU_BYTES = GIB  # of a KV pool on a CPU, unless the options give its size


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a KV pool. `bytes` includes one more block, the null block.

    With `groups` of layers, blocks are the pages of all of them, and the block size is the match unit.
    """

    blocks: int
    block_size: int
    bytes: int
    groups: int = 0

    @property
    def tokens(self) -> int:
        """KV slots. Without groups."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        if self.groups:
            return (
                f"KV pool: {self.blocks:,} pages of {self.groups} groups of layers, match unit {self.block_size} "
                f"tokens, {_size(self.bytes)}"
            )
        return f"KV pool: {self.blocks:,} blocks of {self.block_size} = {self.tokens:,} tokens, {_size(self.bytes)}"


def _size(count: int) -> str:
    """Bytes in the largest fitting unit."""
    for unit, width in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count} bytes"


def pool_size(
    loaded: LoadedModel,
    block_size: int,
    *,
    tokens: int | None = None,
    memory_bytes: int | None = None,
    utilization: float = 0.9,
    useful_tokens: int | None = None,
    bytes_per_token: int | None = None,
) -> PoolSize:
    """The size of the KV pool: `tokens` slots, or `memory_bytes`, or a share `utilization` of the device's memory.

    The share counts memory that is already in use; on a CPU the pool then takes 1 GiB. A size that is not given by
    `tokens` is at most `useful_tokens`. `bytes_per_token` is the size of K and V of one token in all pools, the draft
    KV pool included, in the pools' data type; None: of the model alone, in its own type. Raises ModelError if the
    memory holds no block.
    """
    per_token = loaded.kv_bytes_per_token if bytes_per_token is None else bytes_per_token
    if tokens is None:
        budget = memory_bytes if memory_bytes is not None else _device_budget(loaded, utilization)
        tokens = budget // per_token - block_size  # the null block
        if useful_tokens is not None:
            tokens = min(tokens, -(-useful_tokens // block_size) * block_size)
    blocks = tokens // block_size
    if blocks < 1:
        raise ModelError(
            f"model {loaded.name}: its KV cache takes {per_token:,} bytes a token, and the memory given to it holds "
            f"no block of {block_size} tokens; raise kv_cache_memory_bytes, gpu_memory_utilization or pool_tokens"
        )
    return PoolSize(blocks, block_size, (blocks + 1) * block_size * per_token)


def _device_budget(loaded: LoadedModel, utilization: float) -> int:
    """Bytes for KV: on a GPU `utilization` of its memory minus what is in use and a tenth for activations."""
    if loaded.device.type != "cuda":
        return CPU_BYTES
    free, total = torch.cuda.mem_get_info(loaded.device)
    activations = total // 10
    return max(0, int(utilization * total) - (total - free) - activations)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine."""

    limits: SchedulerLimits
    capacity: PoolSize
    scheduler: Scheduler
    runner: Runner


def build_parts(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | None, clock: Callable[[], float]
) -> EngineParts:
    """Pack the weights, size and make the pool, record the graphs. Raises ModelError if the memory holds no block."""
    if options.pack_weights or (options.pack_weights is None and _packs_well(loaded)):
        replace_layers(loaded.model)
    limits, capacity = _sizes(loaded, options, draft)
    longest = limits.max_model_len or loaded.max_position
    scheduler = (options.scheduler or _default_scheduler(loaded, options))(capacity.blocks, limits)
    manager = scheduler.manager
    grouped = manager if isinstance(manager, GroupedManager) else None
    runner = Runner(
        loaded,
        num_blocks=capacity.blocks,
        block_size=capacity.block_size,
        host_blocks=options.host_blocks,
        backend=options.backend,
        audit=options.audit,
        audit_every=options.audit_every,
        temperature=options.temperature,
        kv_dtype=options.kv_dtype,
        seed=options.seed,
        isolate=True,
        draft=draft,
        graphs=None if grouped else _graphs(loaded, options, limits, longest),
        groups=grouped.layout if grouped else None,
        page_counts=grouped.pages.page_counts if grouped else (),
        clock=clock,
    )
    if grouped is not None:
        sizes = grouped.num_blocks, grouped.block_size, runner.pool.bytes, len(grouped.layout.groups)
        capacity = PoolSize(*sizes)
    return EngineParts(limits, capacity, scheduler, runner)


def _default_scheduler(loaded: LoadedModel, options: EngineOptions) -> MakeScheduler:
    def make(blocks: int, limits: SchedulerLimits) -> Scheduler:
        assert limits.max_model_len is not None  # `_sizes` has set it
        if GroupPages(options.groups) is not GroupPages.off:
            return Scheduler(_grouped_manager(loaded, options, blocks, limits), limits)
        return Scheduler(build_manager(options, blocks, limits.max_model_len), limits)

    return make


def _grouped_manager(
    loaded: LoadedModel, options: EngineOptions, blocks: int, limits: SchedulerLimits
) -> GroupedManager:
    """The manager of the model's groups, in the memory of `blocks` blocks of all layers."""
    layout = model_layout(loaded, options)
    memory = blocks * options.block_size * _token_bytes(loaded, options)
    counts = layout.page_counts(
        memory, limits.max_model_len or loaded.max_position, limits.max_batched_tokens
    )
    if min(counts) < 1:
        raise ModelError(
            f"model {loaded.name}: the memory of {blocks * options.block_size} tokens holds "
            f"{', '.join(map(str, counts))} pages of its groups of layers, each needs at least 1; enlarge the pool"
        )
    return GroupedManager(
        layout,
        pages_of(layout, counts, behind_first=options.behind_first),
        most_chunk=limits.max_batched_tokens,
        prefix_caching=options.prefix_caching,
        window_hits=WindowHits(options.window_hits),
    )


def model_layout(loaded: LoadedModel, options: EngineOptions) -> GroupLayout:
    """The groups of a model's layers, by the K, V and windows that they send and the states that they keep: those that
    see every token first, states last.

    Raises ModelError for options that groups do not serve, and for pages that cannot be unified.
    """
    if CachePolicy(options.cache) is not CachePolicy.paged or options.copy_at_fork:
        what = "copy_at_fork" if options.copy_at_fork else f"cache {options.cache}"
        raise ModelError(
            f"layers in groups: {what} is not served with groups; leave it out, or set groups=off"
        )
    kinds: dict[tuple[int, int], int] = {}
    for shape, window in zip(loaded.group_shapes, loaded.windows, strict=True):
        if size := sum(heads * dim for heads, dim in shape) * loaded.dtype.itemsize:
            kinds[window, size] = kinds.get((window, size), 0) + 1
    whole = GroupKind.latent if loaded.latent_shapes else GroupKind.full
    sets = [
        LayerSet(GroupKind.window if window else whole, layers, size, window or None)
        for (window, size), layers in sorted(kinds.items(), key=lambda each: each[0][0] > 0)
    ]
    states = Counter(map(state_bytes, loaded.states.values()))
    sets += [LayerSet(GroupKind.state, layers, size) for size, layers in states.items()]
    pages = GroupPages(options.groups)
    try:
        if pages is GroupPages.uniform:
            return uniform_layout(sets, options.block_size)
        return separate_layout(sets, options.block_size, state_every=options.state_every, pages=pages)
    except CoreError as error:
        raise ModelError(f"model {loaded.name}: groups={options.groups}: {error}") from error


def _token_bytes(loaded: LoadedModel, options: EngineOptions) -> int:
    """Bytes of K and V of one token of a model, in the pool's data type."""
    off = GroupPages(options.groups) is GroupPages.off
    numbers = sum(
        heads * dim for layer in (loaded.kv_shapes if off else loaded.group_shapes) for heads, dim in layer
    )
    return numbers * kv_item_bytes(options.kv_dtype, loaded.dtype)


def _packs_well(loaded: LoadedModel) -> bool:
    return can_pack(loaded.model) and is_small(loaded.model)


def _sizes(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | None
) -> tuple[SchedulerLimits, PoolSize]:
    """The size of the pool, and the limits with a `max_model_len` that fits into it."""
    limits, useful = engine_limits(loaded, options)
    capacity = pool_size(
        loaded,
        options.slots_per_block,
        tokens=options.pool_tokens,
        memory_bytes=options.kv_cache_memory_bytes,
        utilization=options.gpu_memory_utilization,
        useful_tokens=useful,
        bytes_per_token=sum(_token_bytes(model, options) for model in (loaded, draft) if model is not None),
    )
    longest = limits.max_model_len or loaded.max_position
    if GroupPages(options.groups) is GroupPages.off:  # with groups, windows decide how long a sequence may be
        longest = min(longest, capacity.tokens)
    return replace(limits, max_model_len=longest), capacity


def _graphs(
    loaded: LoadedModel, options: EngineOptions, limits: SchedulerLimits, longest: int
) -> GraphOptions | None:
    """Graphs only for Triton on CUDA, because its kernels read the lengths on the device."""
    if not (options.cuda_graphs and loaded.device.type == "cuda"):
        return None
    if engine_backend(options.backend, loaded.device) != "triton":
        return None
    return GraphOptions(limits.max_running, longest)


def engine_limits(loaded: LoadedModel, options: EngineOptions) -> tuple[SchedulerLimits, int]:
    """The limits in effect, and the largest number of slots that requests can use within them."""
    limits = options.limits or SchedulerLimits(max_model_len=loaded.max_position)
    longest = min(limits.max_model_len or loaded.max_position, loaded.max_position)
    return limits, limits.max_running * longest
