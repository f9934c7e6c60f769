"""From options to the parts of an engine: its limits, its pool, its policy, its runner."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.core.limits import SchedulerLimits
from engine.core.scheduler import Scheduler
from engine.runtime.admission import engine_limits
from engine.runtime.adopting import adopt_layers
from engine.runtime.backends import engine_backend
from engine.runtime.graphs import GraphOptions
from engine.runtime.kv_dtype import kv_item_bytes
from engine.runtime.model import LoadedModel
from engine.runtime.options import EngineOptions, MakeScheduler, build_manager
from engine.runtime.packing import can_pack, is_small
from engine.runtime.runner import Runner
from engine.runtime.sizing import PoolSize, pool_size


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
        adopt_layers(loaded.model)
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
