"""The requests of a point: the trace, decoded as the configuration says, without those that can never fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from engine.core.identity import BlockIdentity, KeyIdentity
from engine.core.limits import SchedulerLimits
from engine.core.request import Decoding, Request
from engine.core.scheduler import Scheduler
from harness.config.errors import ConfigError
from harness.config.schema import CacheConfig, DecodingMode, Oversize, RunConfig, SchedulerConfig
from harness.point.chance import Chance
from harness.point.policies import limits_of, new_scheduler
from harness.point.release import Release, release_of, retimed
from harness.point.shapes import PoolShape, pool_shape
from harness.point.trace import reshaped_trace
from harness.sim.arrivals import TimedRequest
from traces.reshape import drop_oversize
from traces.trace import Trace, TraceRequest

Identify = Callable[[TraceRequest], BlockIdentity]


@dataclass(frozen=True)
class Workload:
    """What a point replays, and on what."""

    trace: Trace
    pool: PoolShape
    limits: SchedulerLimits
    decoding: Decoding
    width: int
    release: Release = Release()  # noqa: RUF009  # frozen
    cache: CacheConfig = field(default_factory=CacheConfig)  # the options of the cache policy
    batching: SchedulerConfig = field(default_factory=SchedulerConfig)  # a user's own policies
    chance: Chance = Chance()  # noqa: RUF009  # frozen

    def scheduler(self) -> Scheduler:
        """A scheduler over an empty pool."""
        return new_scheduler(self.pool, self.limits, self.cache, self.batching)

    def requests(self, identify: Identify | None = None) -> list[TimedRequest]:
        """The requests in order of arrival; their blocks are named by prefix keys unless `identify` says otherwise."""
        return list(self.stream(identify))

    def stream(self, identify: Identify | None = None) -> Iterator[TimedRequest]:
        """The same one by one, for traces whose requests are not to lie in memory all at once."""
        identify = identify or _by_keys
        for row in self.trace.requests:
            yield TimedRequest(_request(self, row, identify(row)), row.arrival_us * 1000)


def _by_keys(row: TraceRequest) -> BlockIdentity:
    return KeyIdentity(row.request_id, row.segments, row.salt)


def _request(workload: Workload, row: TraceRequest, identity: BlockIdentity | None = None) -> Request:
    return Request(
        row.request_id,
        row.prompt_tokens,
        row.output_tokens,
        workload.width,
        workload.decoding,
        identity,
        priority=row.priority,
    )


def build_workload(config: RunConfig) -> Workload:
    """The point's workload; raises ConfigError where a request can never fit and `workload.oversize` is `error`."""
    pool = pool_shape(config)
    width, decoding = _decoding(config)
    limits = limits_of(config.scheduler, pool.max_model_len)
    trace = retimed(reshaped_trace(config), config)
    whole = Workload(trace, pool, limits, decoding, width, release_of(config), config.cache, config.scheduler)
    reasons = _oversize(whole)
    if not reasons:
        return whole
    if config.workload.oversize is Oversize.error:
        raise ConfigError("workload.oversize", _refusal(whole, reasons))
    trace = drop_oversize(whole.trace, lambda row: "never_fits" if row.request_id in reasons else None)
    if not trace.requests:
        raise ConfigError("workload.oversize", f"no request fits: {_refusal(whole, reasons)}")
    return replace(whole, trace=trace)


def _decoding(config: RunConfig) -> tuple[int, Decoding]:
    if config.decoding.beam_width > 1:
        return config.decoding.beam_width, Decoding.BEAM
    if config.decoding.mode is DecodingMode.sample:
        return config.decoding.n, Decoding.SAMPLE
    return 1, Decoding.GREEDY


def _oversize(workload: Workload) -> dict[int, str]:
    """Reasons by request id. Lengths that occur more than once are asked about once."""
    scheduler = workload.scheduler()
    known: dict[tuple[int, int], str | None] = {}
    reasons: dict[int, str] = {}
    for row in workload.trace.requests:
        lengths = (row.prompt_tokens, row.output_tokens)
        if lengths not in known:
            known[lengths] = scheduler.never_fits(_request(workload, row))
        reason = known[lengths]
        if reason:
            reasons[row.request_id] = reason
    return reasons


def _refusal(workload: Workload, reasons: dict[int, str]) -> str:
    request_id, reason = next(iter(reasons.items()))
    row = next(row for row in workload.trace.requests if row.request_id == request_id)
    return (
        f"{len(reasons)} of {len(workload.trace.requests)} requests can never fit; the first is request {request_id} "
        f"({row.prompt_tokens} prompt + {row.output_tokens} output tokens), which {reason}. Raise cache.pool_tokens "
        "or cache.max_model_len, lower workload.length_scale or decoding.beam_width, or set workload.oversize=drop"
    )
