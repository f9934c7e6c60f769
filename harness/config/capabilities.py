"""What goes with what: one table of what a point may ask for, and of the ways to run it that cannot take it.

The checks of a configuration, the choice between compiled and plain replay, the comparison with vLLM's scheduler, their
error texts and a page of the documentation come from `TABLE`. To add a capability, or to lift a limit, change its row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce

from engine.core.options import (
    CachePolicy,
    Eviction,
    GroupPages,
    Preemption,
    Retention,
    Sharing,
    SpeculationMode,
    StateMode,
    WindowHits,
)
from engine.runtime.options import Backend, KVDtype
from harness.config import schema
from harness.config.errors import ConfigError


class Way(StrEnum):
    """A way to run a point that does not take everything; its value says in words what to do instead."""

    groups = "leave it out, or set cache.groups=off"
    measured = "a sweep with measure=false predicts it alone"  # a server measures, and has no such setting
    measured_groups = "a sweep with measure=false predicts it alone, or set cache.groups=off"
    replicas = "leave it out, or set device.data_parallel=1"
    client = "leave it out, or use decoding.sharing=copy_on_write"  # beams that a client sends as requests
    ahead = "leave it out, or set scheduler.async_frees_at_once=true"
    no_cache = "use cache.policy=paged cache.prefix_caching=true"
    no_rows = "use replay.records=true"
    compiled = "use replay.compiled=auto"
    oracle = "set oracle.engine=none"
    vllm = "set engine=cpu to measure our own engine, or measure=false to predict alone"


@dataclass(frozen=True)
class Asked:
    """What a point asks for: sections of its configuration, and what its requests have.

    Before the trace is read `several` (a request has several sequences), `drafts` and `may_share` (two prompts may
    share a block) are what the configuration says.
    """

    model: schema.ModelConfig
    engine: schema.EngineConfig
    device: schema.DeviceConfig
    cache: schema.CacheConfig
    scheduler: schema.SchedulerConfig
    decoding: schema.DecodingConfig
    replay: schema.ReplayConfig
    oracle: schema.OracleEngine
    several: bool
    sampled: bool
    drafts: bool
    may_share: bool
    experts: bool
    # what requests wait for, as replay.mode or the trace's client has it; None: for nothing
    waits: str | None


def asked_of(config: schema.RunConfig) -> Asked:
    """What a configuration asks for."""
    decoding, model, replay = config.decoding, config.model, config.replay
    waits = replay.mode in (schema.ReplayMode.closed, schema.ReplayMode.sessions)
    sampled = decoding.mode is schema.DecodingMode.sample and decoding.beam_width == 1
    return Asked(
        *(model, config.engine, config.device, config.cache, config.scheduler, decoding, replay),
        oracle=config.oracle.engine,
        several=decoding.beam_width > 1 or (sampled and decoding.n > 1),
        sampled=sampled,
        drafts=decoding.draft_tokens > 0,
        may_share=config.cache.prefix_caching,
        experts=model.experts > 0,
        waits=str(replay.mode) if waits else "capped" if replay.max_in_flight else None,
    )


@dataclass(frozen=True)
class Capability:
    """Something that a point may ask for by `key`, and why each of some ways cannot take it.

    `asks(asked)` is what it asks for: True stands for what is at the key, and what is false for nothing.
    """

    key: str
    asks: Callable[[Asked], object]
    reasons: Mapping[Way, str]


def _is_special(a: Asked) -> bool:
    """Whether its requests have several sequences or are swapped, or blocks are evicted by a rule of their own."""
    return a.several or a.cache.eviction != Eviction.lru or a.scheduler.preemption is Preemption.swap


_OWN = "a policy of your own runs in Python alone"
_ROWS = "such a run keeps no rows"
_NO_CACHE = "there is no prefix cache"
_UNKNOWN = "requests for beams are none of the trace, and it does not know them"
_ONE = "it serves one replica"
_BY_REQUEST = (Eviction.ttl, Eviction.priority, Eviction.superseded)  # rules that look at the request
_COMPILED_RULES = (Eviction.ttl, Eviction.pinned, Eviction.priority)
_KEPT = "it is kept for one replica alone"

TABLE: tuple[Capability, ...] = (
    Capability("cache.policy", lambda a: a.cache.policy is not CachePolicy.paged,
               {Way.compiled: "it is not paged", Way.oracle: "vLLM has no contiguous cache"}),
    Capability("cache.groups", lambda a: a.cache.groups is not GroupPages.off,
               {Way.vllm: "it is compared by one block table"}),
    Capability("cache.groups", lambda a: a.cache.groups is not GroupPages.off
               and (a.cache.groups is not GroupPages.uniform or a.cache.block_size % 16 > 0
                    or a.cache.window_hits is not WindowHits.window or a.cache.behind_first
                    or a.cache.states is not StateMode.align or a.drafts),
               {Way.oracle: "vLLM has groups in pages of one size and blocks of multiples of 16 tokens; their windows "
                "are hit and evicted in one way, states are kept at the ends of rows, and a draft model would be a "
                "group of its own"}),
    Capability("cache.groups", lambda a: a.cache.groups is not GroupPages.off
               and (a.several or a.drafts or a.cache.behind_first or a.scheduler.preemption is Preemption.swap
                    or not a.scheduler.mixed_steps),
               {Way.compiled: "layers in groups have requests of several sequences, drafts, swaps, an order of their "
                "own, or steps of prompts alone"}),
    Capability("cache.block_size", lambda a: a.cache.block_size % 32 > 0,
               {Way.vllm: "on a CPU vLLM has blocks of multiples of 32 tokens"}),
    Capability("engine.device", lambda a: a.engine.device is not schema.EngineDevice.cpu,
               {Way.vllm: "vLLM is measured on a CPU alone; a server on a GPU is read by its log (pagetwin_probe, "
                "twin)"}),
    Capability("engine.backend", lambda a: a.engine.backend is not Backend.auto,
               {Way.vllm: "vLLM has its own kernels"}),
    Capability("model.windowed_layers",
               lambda a: a.model.windowed_layers or a.model.state_layers or a.model.latent_rank,
               {Way.vllm: "its layers with windows, states or latent vectors are not compared"}),
    Capability("decoding.mode", lambda a: a.several and "several sequences",
               {Way.oracle: "vLLM's scheduler does not see beams or samples as one request; it gets one for each "
                "sample (decoding.sharing=prefix_cache)"}),
    Capability("decoding.mode", lambda a: a.sampled,
               {Way.vllm: "it is measured with the most likely tokens alone (temperature 0)"}),
    Capability("decoding.draft_tokens", lambda a: a.drafts,
               {Way.ahead: "vLLM schedules the next drafts before it knows how many were right, which is not modelled",
                Way.vllm: "a measured vLLM has no draft model"}),
    Capability("decoding.draft_tokens", lambda a: a.drafts and _is_special(a),
               {Way.compiled: "requests have drafts, beside samples, beams, swaps or a rule of cache.eviction"}),
    Capability("decoding.draft_place", lambda a: a.drafts and a.decoding.draft_place is not SpeculationMode.whole,
               {Way.oracle: "vLLM does not cut drafts at the end of a request, nor write them into a child",
                Way.compiled: "drafts are cut at the end of a request, or written into a child"}),
    Capability("decoding.branch_hazard", lambda a: a.decoding.branch_hazard,
               {Way.compiled: "ends of sampled branches are drawn",
                Way.ahead: "vLLM schedules one row more for what ends before its last token, which is not modelled"}),
    Capability("decoding.beam_parents", lambda a: a.decoding.beam_parents,
               {Way.compiled: "beams follow a recording"}),
    Capability("decoding.sharing", lambda a: a.several and a.decoding.sharing is Sharing.tail_at_fork,
               {Way.compiled: "beams keep their blocks",
                Way.groups: "its beams continue the pages of their parents"}),
    Capability("scheduler.preemption", lambda a: a.scheduler.preemption is not Preemption.recompute,
               {Way.oracle: "vLLM swaps nothing out"}),
    Capability("scheduler.preemption", lambda a: a.scheduler.preemption is not Preemption.recompute and a.several,
               {Way.compiled: "several sequences may be swapped out"}),
    Capability("scheduler.static_batch", lambda a: a.scheduler.static_batch,
               {Way.compiled: "batching is not continuous", Way.oracle: "vLLM has no static batches",
                Way.ahead: "a static batch holds its blocks to its end"}),
    Capability("scheduler.mixed_steps", lambda a: not a.scheduler.mixed_steps,
               {Way.oracle: "vLLM mixes prompts and decodes in its steps"}),
    Capability("scheduler.adaptive_watermark", lambda a: a.scheduler.adaptive_watermark,
               {Way.compiled: "the watermark is adaptive", Way.oracle: "vLLM has no adaptive watermark"}),
    Capability("scheduler.admission", lambda a: a.scheduler.admission,
               {Way.groups: "free pages say little of single groups", Way.compiled: _OWN, Way.oracle: _OWN}),
    Capability("scheduler.order", lambda a: a.scheduler.order, {Way.compiled: _OWN, Way.oracle: _OWN}),
    Capability("scheduler.victim", lambda a: a.scheduler.victim, {Way.compiled: _OWN, Way.oracle: _OWN}),
    Capability("cache.eviction", lambda a: a.cache.eviction != Eviction.lru,
               {Way.groups: "it has two orders of its own (cache.behind_first)",
                Way.oracle: "vLLM evicts the least recently used alone"}),
    Capability("cache.eviction", lambda a: a.cache.eviction in _BY_REQUEST, {Way.client: _UNKNOWN}),
    Capability("cache.eviction", lambda a: a.cache.eviction not in (Eviction.lru, *_COMPILED_RULES),
               {Way.compiled: "it knows no such order of eviction"}),
    Capability("cache.eviction", lambda a: a.cache.eviction != Eviction.lru
               and (a.several or a.device.data_parallel > 1 or a.scheduler.preemption is not Preemption.recompute),
               {Way.compiled: "a rule of eviction stands beside several sequences, replicas or swapped requests"}),
    Capability("scheduler.async_scheduling", lambda a: a.scheduler.async_scheduling,
               {Way.groups: "steps in flight would keep blocks behind a window for one step more",
                Way.vllm: "on a CPU vLLM switches it off"}),
    Capability("scheduler.async_frees_at_once",
               lambda a: a.scheduler.async_scheduling and a.scheduler.async_frees_at_once,
               {Way.oracle: "vLLM keeps the blocks of what a step ends until the next one is scheduled"}),
    Capability("cache.deduplicate", lambda a: a.cache.deduplicate,
               {Way.groups: "it merges no equal blocks", Way.oracle: "vLLM merges no equal blocks"}),
    Capability("cache.deduplicate", lambda a: a.cache.deduplicate and a.may_share,
               {Way.compiled: "prompts may share prefixes, and equal blocks are merged"}),
    Capability("cache.retention", lambda a: a.cache.retention is not Retention.lru,
               {Way.oracle: "vLLM keeps freed blocks until they are taken"}),
    Capability("cache.copy_at_fork", lambda a: a.cache.copy_at_fork and a.several,
               {Way.compiled: "branches copy their blocks", Way.groups: "its branches share their pages"}),
    Capability("cache.pool_blocks",
               lambda a: a.cache.groups is not GroupPages.uniform and a.cache.pool_blocks is not None,
               {Way.groups: "pages of its pools differ; use cache.pool_tokens"}),
    Capability("cache.tier_tokens", lambda a: a.cache.tier_tokens,
               {Way.groups: "not modelled: a tier finds leading blocks, windows and states hit by their last",
                Way.oracle: "it is compared without tiers", Way.client: _UNKNOWN}),
    Capability("cache.tier_tokens",
               lambda a: a.cache.tier_tokens > 0 and (_is_special(a) or a.cache.tier_eviction is not Eviction.lru),
               {Way.compiled: "tiers stand beside several sequences, swapped requests or a rule of eviction other than "
                "lru"}),
    Capability("cache.disk_tokens", lambda a: a.cache.tier_tokens > 0 and a.cache.disk_tokens,
               {Way.measured: "files are read from the system's memory again, so no disk would be timed"}),
    Capability("cache.answers", lambda a: a.cache.answers,
               {Way.groups: "it keeps no answers", Way.client: _UNKNOWN,
                Way.compiled: "later prompts find the blocks of answers",
                Way.vllm: "vLLM answers as its model does"}),
    Capability("cache.answers", lambda a: a.cache.answers and (a.several or a.drafts),
               {Way.measured: "the engine is told the answers of single sequences without drafts alone"}),
    Capability("replay.optimum", lambda a: a.replay.optimum,
               {Way.groups: "the bound is that of one block table", Way.replicas: _ONE, Way.client: _UNKNOWN,
                Way.no_cache: _NO_CACHE, Way.no_rows: _ROWS}),
    *(
        Capability(key, asks, {Way.groups: reason, Way.replicas: _KEPT, Way.no_cache: _NO_CACHE, Way.no_rows: _ROWS,
                               Way.compiled: kept})
        for key, asks, reason, kept in (
            ("replay.kv_events", lambda a: a.replay.kv_events, "it keeps no events of the prefix cache",
             "events of the prefix cache are kept"),
            ("replay.lookups", lambda a: a.replay.lookups, "it keeps no lookups",
             "lookups of the prefix cache are kept"),
            ("replay.residency", lambda a: a.replay.residency, "it samples no residency",
             "the residency of blocks is sampled"),
        )
    ),
    Capability("replay.mode", lambda a: a.waits,
               {Way.replicas: "requests wait for others, which may run on another replica; use an open loop (trace, "
                "poisson, gamma, offline)"}),
    Capability("device.frontend_request_us",
               lambda a: a.device.data_parallel > 1 and (
                   a.device.frontend_request_us or a.device.frontend_token_us or a.device.frontend_turn_us),
               {Way.compiled: "the server's front end delays requests before they go to replicas"}),
    Capability("replay.duration_s", lambda a: a.replay.duration_s, {Way.compiled: "the replay stops early"}),
    Capability("device.data_parallel", lambda a: a.device.data_parallel > 1,
               {Way.measured: "the engine measures one replica", Way.client: _UNKNOWN,
                Way.oracle: "several replicas are simulated"}),
    Capability("model.kv_dtype", lambda a: a.model.kv_dtype is not KVDtype.model,
               {Way.vllm: "on a CPU vLLM keeps K and V in the type of the model"}),
    Capability("engine.cuda_graphs", lambda a: a.engine.cuda_graphs,
               {Way.measured_groups: "a recorded step has one block table",
                Way.vllm: "vLLM is measured eagerly"}),
    Capability("oracle", lambda a: a.oracle is not schema.OracleEngine.none,
               {Way.vllm: "every step of a measured vLLM is compared anyway"}),
)  # fmt: skip
_BESIDES = {Way.vllm: Way.oracle}
"""Ways that cannot take either what another one cannot."""


def obstacles(asked: Asked, way: Way) -> Iterator[tuple[str, str]]:
    """What a point asks for that a way cannot take: the key, and the reason in words."""
    for key, value, reason in _untaken(asked, way):
        yield key, f"{reason} ({key}={value})"


def _untaken(asked: Asked, way: Way) -> Iterator[tuple[str, str, str]]:
    """Key, value and reason of what a way cannot take."""
    for row in TABLE:
        reason = row.reasons.get(way) or row.reasons.get(_BESIDES.get(way, way))
        if reason and (value := row.asks(asked)):
            value = reduce(getattr, row.key.split("."), asked) if value is True else value
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield row.key, text, reason


def check_combinations(config: schema.RunConfig) -> Iterator[ConfigError]:
    """What a configuration asks for that does not go together."""
    asked = asked_of(config)
    ways = {
        Way.groups: (config.cache.groups is not GroupPages.off, f"cache.groups={config.cache.groups}"),
        Way.measured: (config.measure, "measure=true"),
        Way.measured_groups: (
            config.measure and config.cache.groups is not GroupPages.off,
            f"measure=true and cache.groups={config.cache.groups}",
        ),
        Way.vllm: (config.measure and config.engine.on_vllm, "engine=vllm"),
        Way.replicas: (
            config.device.data_parallel > 1, f"device.data_parallel={config.device.data_parallel}"
        ),
        Way.ahead: (
            config.scheduler.async_scheduling and not config.scheduler.async_frees_at_once,
            "scheduler.async_scheduling=true",
        ),
        Way.no_cache: (
            not config.cache.prefix_caching or config.cache.policy is not CachePolicy.paged,
            "a cache without prefixes",
        ),
        Way.no_rows: (not config.replay.records, "replay.records=false"),
    }  # fmt: skip
    for way, (is_on, head) in ways.items():
        if is_on:
            yield from refusals(asked, way, head)


def refusals(asked: Asked, way: Way, head: str) -> Iterator[ConfigError]:
    """An error for each thing that `way`, in words `head`, cannot take."""
    for key, value, reason in _untaken(asked, way):
        yield ConfigError(key, f"found {value}, not with {head}: {reason}; {way}")
