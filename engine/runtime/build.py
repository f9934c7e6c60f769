"""Builds the parts of an engine from its options: limits, size of the KV pool, scheduler, runner."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.core.options import SchedulerLimits
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.attention.select import engine_backend
from engine.runtime.errors import ModelError
from engine.runtime.graphs import GraphOptions
from engine.runtime.kv_pool import kv_item_bytes
from engine.runtime.models.cpu_layers import can_pack, is_small, replace_layers
from engine.runtime.models.load import LoadedModel
from engine.runtime.options import EngineOptions, MakeScheduler, build_manager
from engine.runtime.runner import Runner

GIB = 1 << 30
CPU_BYTES = GIB  # on a CPU, where nobody says what memory is for


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool: what it holds and what it costs. One more block, the null block, is in `bytes`."""

    blocks: int
    block_size: int
    bytes: int

    @property
    def tokens(self) -> int:
        """KV slots."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        return f"KV pool: {self.blocks:,} blocks of {self.block_size} = {self.tokens:,} tokens, {_size(self.bytes)}"


def _size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, width in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count} bytes"


def pool_size(
    loaded: "LoadedModel",
    block_size: int,
    *,
    tokens: int | None = None,
    memory_bytes: int | None = None,
    utilization: float = 0.9,
    useful_tokens: int | None = None,
    bytes_per_token: int | None = None,
) -> PoolSize:
    """`tokens` slots, or `memory_bytes`, or `utilization` of the device less what is in use (1 GiB on a CPU).

    More than `useful_tokens` are never taken unless asked for by `tokens`. `bytes_per_token` is what K and V of
    all lanes take (a draft model's too, and in the pool's type); None: the model's own. Raises ModelError if not one
    block fits.
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


def _device_budget(loaded: "LoadedModel", utilization: float) -> int:
    """Bytes for KV: of a GPU its share of the memory less what is in use, and a tenth of it for activations."""
    import torch

    if loaded.device.type != "cuda":
        return CPU_BYTES
    free, total = torch.cuda.mem_get_info(loaded.device)
    activations = total // 10
    return max(0, int(utilization * total) - (total - free) - activations)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    limits: SchedulerLimits
    capacity: PoolSize
    scheduler: Scheduler
    runner: Runner


def build_parts(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | None, clock: Callable[[], float]
) -> EngineParts:
    """Size the pool, pack the weights, record the graphs. Raises ModelError where no block fits."""
    if options.pack_weights or (options.pack_weights is None and _packs_well(loaded)):
        replace_layers(loaded.model)
    limits, capacity = _sizes(loaded, options, draft)
    longest = limits.max_model_len or loaded.max_position
    scheduler = (options.scheduler or _plain_scheduler(options))(capacity.blocks, limits)
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
        graphs=_graphs(loaded, options, limits, longest),
        clock=clock,
    )
    return EngineParts(limits, capacity, scheduler, runner)


def _plain_scheduler(options: EngineOptions) -> MakeScheduler:
    def make(blocks: int, limits: SchedulerLimits) -> Scheduler:
        assert limits.max_model_len is not None  # `_sizes` has set it
        return Scheduler(build_manager(options, blocks, limits.max_model_len), limits)

    return make


def _token_bytes(lane: LoadedModel, options: EngineOptions) -> int:
    """K and V of a token in one lane, in the pool's type."""
    numbers = lane.kv_bytes_per_token // lane.dtype.itemsize
    return numbers * kv_item_bytes(options.kv_dtype, lane.dtype)


def _packs_well(loaded: LoadedModel) -> bool:
    return can_pack(loaded.model) and is_small(loaded.model)


def _sizes(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | None
) -> tuple[SchedulerLimits, PoolSize]:
    """The pool, and limits that no request can exceed for want of it."""
    limits, useful = engine_limits(loaded, options)
    capacity = pool_size(
        loaded,
        options.slots_per_block,
        tokens=options.pool_tokens,
        memory_bytes=options.kv_cache_memory_bytes,
        utilization=options.gpu_memory_utilization,
        useful_tokens=useful,
        bytes_per_token=sum(_token_bytes(lane, options) for lane in (loaded, draft) if lane is not None),
    )
    longest = min(limits.max_model_len or loaded.max_position, capacity.tokens)
    return replace(limits, max_model_len=longest), capacity


def _graphs(
    loaded: LoadedModel, options: EngineOptions, limits: SchedulerLimits, longest: int
) -> GraphOptions | None:
    """Graphs replay kernels that read lengths on the device: the triton ones."""
    if not (options.cuda_graphs and loaded.device.type == "cuda"):
        return None
    if engine_backend(options.backend, loaded.device) != "triton":
        return None
    return GraphOptions(limits.max_running, longest)


def engine_limits(loaded: LoadedModel, options: EngineOptions) -> tuple[SchedulerLimits, int]:
    """The limits in effect, and how many slots they can use at most."""
    limits = options.limits or SchedulerLimits(max_model_len=loaded.max_position)
    longest = min(limits.max_model_len or loaded.max_position, loaded.max_position)
    return limits, limits.max_running * longest
