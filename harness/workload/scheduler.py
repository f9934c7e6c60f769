"""The scheduler of a deployment: the policy core over an empty pool, with the user's classes and observers of memory.

This is the one place where a deployment becomes a core, so both sides get the same one.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.core.memory.block_pool import ResidencySampler
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.eviction import EvictionPolicy
from engine.core.memory.eviction_rules import new_policy
from engine.core.memory.group_chunks import pages_of
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.memory.tiers import HostBlocks, Tier, Tiers, TierSpec
from engine.core.options import CachePolicy, Eviction, Sharing
from engine.core.policies import Policies
from engine.core.scheduling.scheduler import Scheduler
from harness.config.errors import ConfigError, UserError
from harness.config.schema import ReplayConfig
from harness.replay.memory import MemoryObserver, memory_observers
from harness.workload.deployment import Deployment

_METHODS = {
    "cache.eviction": ("push", "reuse", "forget", "pop", "blocks", "__len__"),
    "scheduler.order": ("key",),
    "scheduler.victim": ("choose",),
    "scheduler.admission": ("allows",),
}
# What is taken of a method's result: a core in machine code takes no number of NumPy.
_TAKEN: dict[str, Callable[..., Any]] = {
    "pop": lambda found, *_: [*map(index, found)],
    "key": lambda found, *_: found if isinstance(found, tuple) else (found,),
    "choose": lambda found, _, candidates: range(len(candidates))[index(found)],
    "allows": lambda found, *_: bool(found),
}


def new_scheduler(deployment: Deployment, *, keep_events: bool = False) -> Scheduler:
    """A scheduler over an empty pool; a paged one collects changes of its prefix cache where asked.

    Raises:
        ConfigError: a class of the user cannot be imported or made, or lacks a method.
    """
    return observed_scheduler(deployment, ReplayConfig(kv_events=keep_events), clock=time.monotonic_ns)[0]


def observed_scheduler(
    deployment: Deployment,
    keep: ReplayConfig,
    *,
    clock: Callable[[], int],
    eviction: EvictionPolicy | None = None,
) -> tuple[Scheduler, list[MemoryObserver]]:
    """The same, and the observers of its memory that `keep` asks for; `clock` gives the time in ns.

    `eviction` is used instead of the eviction order that the cache names.
    """
    pool, cache, limits = deployment.pool, deployment.cache, deployment.limits
    builtin, scheduler = Policies.of(limits.policy), deployment.scheduler
    policies = Policies(
        order=_user_policy("scheduler.order", scheduler.order) or builtin.order,
        victim=_user_policy("scheduler.victim", scheduler.victim) or builtin.victim,
        admission=_user_policy("scheduler.admission", scheduler.admission) or builtin.admission,
    )
    eviction = eviction_policy(deployment, clock) if eviction is None else eviction
    tiers = tiers_below(deployment, eviction)
    manager: KVCacheManager
    if pool.groups is not None:
        manager = PagedManager.of(
            pages_of(
                pool.groups, pool.page_counts, retention=cache.retention, behind_first=cache.behind_first
            ),
            most_chunk=limits.max_batched_tokens,
            prefix_caching=pool.prefix_caching,
            window_hits=cache.window_hits,
            retention_interval=cache.retention_interval,
            host_slots=cache.host_tokens * pool.kv_bytes_per_token // pool.groups.slot_bytes,
        )
    elif pool.policy is not CachePolicy.paged:
        reservation = pool.policy.reservation
        manager = ContiguousManager(pool.num_blocks, pool.max_model_len, reservation, cache.placement)
    else:
        manager = PagedManager(
            pool.num_blocks,
            pool.block_size,
            prefix_caching=pool.prefix_caching,
            retention=cache.retention,
            deduplicate=cache.deduplicate,
            copy_at_fork=cache.copy_at_fork,
            keeps_beams=deployment.decoding.sharing is Sharing.tail_at_fork,
            host_blocks=cache.host_tokens // pool.block_size,
            eviction=eviction,
            keep_events=keep.kv_events,
            keep_lookups=keep.lookups,
            residency=None if keep.residency is None else ResidencySampler(keep.residency, clock=clock),
            tiers=tiers,
        )
    return Scheduler(manager, limits, policies), memory_observers(manager, pool.kv_bytes_per_token)


def eviction_policy(deployment: Deployment, clock: Callable[[], int] = lambda: 0) -> EvictionPolicy:
    """A new policy of eviction; `clock` gives the time in ns. It prices what is lost by the
    device's arithmetic alone.

    Raises:
        ConfigError: a class of the user cannot be imported or made, or lacks a method.
    """
    cache, model, device = deployment.cache, deployment.shape, deployment.hardware
    if cache.eviction in set(Eviction):
        rule, pinned = Eviction(cache.eviction), cache.pinned_tokens // deployment.pool.block_size
        policy = new_policy(rule, ttl_s=cache.ttl_s, pinned=pinned)
    else:
        policy = _user_policy("cache.eviction", cache.eviction)
    flops = device.flops * device.parallel
    policy.facts.clock, policy.facts.block_size = clock, deployment.pool.block_size
    policy.facts.token_s = 2 * model.token_weights / (flops * device.compute_efficiency)
    pairs = model.prompt_pair_flops * model.attention_layers
    policy.facts.pair_s = pairs / (flops * device.attention_efficiency)
    return policy


def goes_singly(deployment: Deployment) -> bool:
    """Whether each step must be replayed as one: a rule of eviction depends on the time, or what tiers copy is a part
    of one step, and not of all that a fast-forward takes together.
    """
    below = deployment.copies_tiers or deployment.cache.tier_eviction is Eviction.ttl
    return (deployment.cache.tier_tokens > 0 and below) or eviction_policy(deployment).reads_clock


def host_tier(deployment: Deployment, tokens: int) -> TierSpec:
    """A tier of `tokens` KV slots in host memory.

    A device reads its share over its own link, in 2 x layers transfers for each block or chunk, as it swaps blocks.
    """
    cache, size = deployment.cache, deployment.pool.block_size
    shape, model = deployment.hardware, deployment.shape
    link_s = size * deployment.pool.kv_bytes_per_token * model.kv_share(shape.parallel) / shape.host_bandwidth
    latency_s = 2 * model.attention_layers * shape.host_latency_s
    return TierSpec("host", tokens // (cache.tier_chunk or size), link_s, link_s, latency_s)


def tiers_below(deployment: Deployment, policy: EvictionPolicy) -> Tiers | None:
    """New tiers below the pool, None where it has none; `policy` is that of the pool.

    What the disk has passes the host.
    """
    cache, size = deployment.cache, deployment.pool.block_size
    if not cache.tier_tokens:
        return None
    device, host = deployment.device, host_tier(deployment, cache.tier_tokens)
    specs, unit = [host], cache.tier_chunk or size
    if cache.disk_tokens:
        whole = size * deployment.pool.kv_bytes_per_token
        read_s, write_s = (whole / (rate * 1e9) for rate in (device.disk_read_gbs, device.disk_write_gbs))
        late_s = host.latency_s + device.disk_latency_us * 1e-6
        specs.append(TierSpec("disk", cache.disk_tokens // unit, host.read_s + read_s, write_s, late_s))
    made = []
    for spec in specs:
        rule = new_policy(cache.tier_eviction, ttl_s=cache.ttl_s, pinned=cache.pinned_tokens // unit)
        rule.facts = replace(policy.facts, block_size=unit)
        made.append(Tier(spec, rule))
    spare = min(specs[0].units, deployment.pool.num_blocks)
    return Tiers(
        *(made, policy.facts),
        copies=HostBlocks(cache.host_tokens // size, spare) if deployment.copies_tiers else None,
        chunk=unit // size,
        store=cache.tier_store,
        load=cache.tier_load,
        overlaps=cache.tier_overlap,
    )


def _imported(module: str) -> ModuleType:
    """A module of the user's, which may lie in the working directory."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return import_module(module)


def own_code(deployment: Deployment) -> str:
    """Digests of the files of the user's own policies, which keep their names when they are edited; empty without any.

    What such a file imports is not looked at.
    """
    scheduler = deployment.scheduler
    named = (scheduler.order, scheduler.victim, scheduler.admission, deployment.cache.eviction)
    modules = (name.partition(":")[0] for name in named if name and ":" in name)
    files = (getattr(_imported(module), "__file__", None) for module in modules)
    return " ".join(sha256(Path(file).read_bytes()).hexdigest() for file in files if file)


def _user_policy(key: str, name: str | None) -> Any:
    """A new instance of the user's class."""
    if name is None:
        return None
    module, _, cls = name.partition(":")
    try:
        instance = getattr(_imported(module), cls)()
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(key, f"'{name}' cannot be made: {type(error).__name__}: {error}") from error
    needed = (*_METHODS[key], *(["facts"] if key == "cache.eviction" else []))
    missing = [each for each in needed if not hasattr(instance, each)]
    if missing:
        raise ConfigError(key, f"'{name}' lacks {', '.join(missing)}; see engine/core/policies.py")
    guarded = {each: _guarded(key, name, each, getattr(type(instance), each)) for each in _METHODS[key]}
    instance.__class__ = type(cls, (type(instance),), {"__slots__": (), **guarded})
    return instance


def _guarded(key: str, name: str, each: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the user's class that gets lists of its own; what goes wrong in it is told by its name."""
    taken: Callable[..., Any] = _TAKEN.get(each, lambda found, *_: found)

    def call(*arguments: Any) -> Any:
        try:
            return taken(method(*([*one] if isinstance(one, list) else one for one in arguments)), *arguments)
        except Exception as error:
            failed = f"{key}: '{name}' has failed in {each}: {type(error).__name__}: {error}"
            raise UserError(failed) from error

    return call
