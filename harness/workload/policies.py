"""The scheduler of a point, from its configuration: KV cache manager, limits, and a user's own policies."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.eviction import EvictionQueue
from engine.core.memory.grouped import GroupedManager, pages_of
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.memory.residency import ResidencySampler
from engine.core.options import CachePolicy, SchedulerLimits, SchedulerOptions
from engine.core.policies import Policies
from engine.core.scheduling.scheduler import Scheduler
from harness.config.errors import ConfigError
from harness.config.schema import CacheConfig, SchedulerConfig
from harness.workload.shapes import PoolShape

_METHODS = {
    "cache.eviction": ("push", "remove", "pop", "blocks", "__len__"),
    "scheduler.order": ("key",),
    "scheduler.victim": ("choose",),
    "scheduler.admission": ("allows",),
}


def new_scheduler(
    pool: PoolShape,
    limits: SchedulerLimits,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    keeps_beams: bool = False,
    keep_events: bool = False,
    keep_lookups: bool = False,
    residency: ResidencySampler | None = None,
    eviction: EvictionQueue | None = None,
) -> Scheduler:
    """A scheduler over an empty pool; a paged one keeps changes and lookups of its prefix cache where asked.

    `residency` samples its blocks. With `keeps_beams` beams keep their own blocks. `eviction` is used instead of the
    eviction order that `cache` names.

    Raises:
        ConfigError: a class of the user cannot be imported or made, or lacks a method.
    """
    if pool.groups is not None:
        manager: KVCacheManager = GroupedManager(
            pool.groups,
            pages_of(
                pool.groups, pool.page_counts, retention=cache.retention, behind_first=cache.behind_first
            ),
            most_chunk=limits.max_batched_tokens,
            prefix_caching=pool.prefix_caching,
            window_hits=cache.window_hits,
        )
        return Scheduler(manager, limits, _policies(limits, scheduler))
    manager = _manager(
        pool,
        cache,
        eviction,
        keeps_beams=keeps_beams,
        keep_events=keep_events,
        keep_lookups=keep_lookups,
        residency=residency,
    )
    return Scheduler(manager, limits, _policies(limits, scheduler))


def _manager(
    pool: PoolShape,
    cache: CacheConfig,
    eviction: EvictionQueue | None,
    *,
    keeps_beams: bool,
    keep_events: bool,
    keep_lookups: bool,
    residency: ResidencySampler | None,
) -> KVCacheManager:
    if pool.policy is not CachePolicy.paged:
        reservation = pool.policy.reservation
        return ContiguousManager(pool.num_blocks, pool.max_model_len, reservation, cache.placement)
    return PagedManager(
        pool.num_blocks,
        pool.block_size,
        prefix_caching=pool.prefix_caching,
        retention=cache.retention,
        deduplicate=cache.deduplicate,
        copy_at_fork=cache.copy_at_fork,
        keeps_beams=keeps_beams,
        host_blocks=cache.host_tokens // pool.block_size,
        eviction=_user_policy("cache.eviction", cache.eviction) if eviction is None else eviction,
        keep_events=keep_events,
        keep_lookups=keep_lookups,
        residency=residency,
    )


def _policies(limits: SchedulerLimits, scheduler: SchedulerConfig) -> Policies:
    builtin = Policies.of(limits.policy)
    return Policies(
        order=_user_policy("scheduler.order", scheduler.order) or builtin.order,
        victim=_user_policy("scheduler.victim", scheduler.victim) or builtin.victim,
        admission=_user_policy("scheduler.admission", scheduler.admission) or builtin.admission,
    )


def limits_of(scheduler: SchedulerConfig, max_model_len: int) -> SchedulerLimits:
    """The scheduler's limits, as the configuration says; `max_model_len` in tokens."""
    options = {option.name: getattr(scheduler, option.name) for option in fields(SchedulerOptions)}
    return SchedulerLimits(**options, max_model_len=max_model_len)


def _user_policy(key: str, name: str | None) -> Any:
    """A new instance of the user's class; modules in the working directory are found too."""
    if name is None:
        return None
    module, _, cls = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        instance = getattr(import_module(module), cls)()
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(key, f"'{name}' cannot be made: {type(error).__name__}: {error}") from error
    return _with_methods(key, name, instance, _METHODS[key])


def _with_methods(key: str, name: str, instance: Any, methods: Sequence[str]) -> Any:
    missing = [method for method in methods if not callable(getattr(instance, method, None))]
    if missing:
        raise ConfigError(key, f"'{name}' lacks {', '.join(missing)}; see engine/core/policies.py")
    return instance
