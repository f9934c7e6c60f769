"""The requests of a point: the trace, decoded as the configuration says, without requests that can never fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from engine.core.identity import BlockIdentity, KeyIdentity
from engine.core.options import Decoding, SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.config.errors import ConfigError
from harness.config.schema import CacheConfig, Compiled, Oversize, RunConfig, SchedulerConfig
from harness.replay.arrivals import TimedRequest
from harness.replay.virtual_time import LATEST_NS
from harness.workload.chance import Chance, chance_of, recorded_parents
from harness.workload.forms import Form, Forms, forms_of
from harness.workload.policies import limits_of, new_scheduler
from harness.workload.release import Release, release_of, retimed
from harness.workload.shapes import PoolShape, pool_shape
from harness.workload.trace import reshaped_trace
from traces.reshape import drop_oversize
from traces.trace import Trace, TraceRequest

Identify = Callable[[TraceRequest], BlockIdentity]


@dataclass(frozen=True)
class Workload:
    """What a point replays, and on what."""

    trace: Trace
    pool: PoolShape
    limits: SchedulerLimits
    forms: Forms = Forms()  # noqa: RUF009  # frozen
    release: Release = Release()  # noqa: RUF009  # frozen
    cache: CacheConfig = field(default_factory=CacheConfig)  # the options of the cache policy
    batching: SchedulerConfig = field(default_factory=SchedulerConfig)  # a user's own policies
    chance: Chance = Chance()  # noqa: RUF009  # frozen
    compiled: Compiled = Compiled.auto

    @property
    def decoding(self) -> Decoding:
        """How requests are decoded whose rows do not say."""
        return self.forms.configured.decoding

    @property
    def width(self) -> int:
        """Sequences of a request whose row does not say."""
        return self.forms.configured.width

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
    form = workload.forms.of(row)
    return Request(
        row.request_id,
        row.prompt_tokens,
        _output_tokens(workload, row, form),
        form.width,
        form.decoding,
        identity,
        priority=row.priority,
        speculation=form.speculation,
    )


def _output_tokens(workload: Workload, row: TraceRequest, form: Form) -> int:
    """The trace's output, or, where sampled branches end by chance, the longest branch's."""
    survival = workload.chance.survival
    never_runs = form.width > workload.limits.max_running
    if survival is None or form.decoding is not Decoding.SAMPLE or never_runs:
        return row.output_tokens
    branches = range(form.width)
    return max(survival.length(row.request_id, branch, row.output_tokens) for branch in branches)


def build_workload(config: RunConfig) -> Workload:
    """The point's workload; raises ConfigError where a request can never fit and `workload.oversize` is `error`."""
    pool = pool_shape(config)
    forms, release = forms_of(config), release_of(config)
    limits = limits_of(config.scheduler, pool.max_model_len)
    trace = forms.named(retimed(reshaped_trace(config), config))
    _check_span(trace)
    whole = Workload(
        trace,
        pool,
        limits,
        forms,
        release,
        config.cache,
        config.scheduler,
        chance_of(config),
        compiled=config.replay.compiled,
    )
    reasons = _oversize(whole)
    if not reasons:
        return with_recorded_beams(config, whole)
    if config.workload.oversize is Oversize.error:
        raise ConfigError("workload.oversize", _refusal(whole, reasons))
    trace = drop_oversize(whole.trace, lambda row: "never_fits" if row.request_id in reasons else None)
    if not trace.requests:
        raise ConfigError("workload.oversize", f"no request fits: {_refusal(whole, reasons)}")
    return with_recorded_beams(config, replace(whole, trace=trace))


def _check_span(trace: Trace) -> None:
    """Raises ConfigError where the last request arrives later than a replay's clock counts."""
    last_us = trace.requests[-1].arrival_us if trace.requests else 0
    if last_us * 1000 > LATEST_NS:
        raise ConfigError(
            "workload.request_rate",
            f"the last of {len(trace.requests):,} requests arrives after {last_us / 1e6 / 86400 / 365:,.0f} years, "
            "and replays count 146; take fewer requests or a higher rate",
        )


def _oversize(workload: Workload) -> dict[int, str]:
    """Reasons by request id. Requests of equal lengths and form are asked about once."""
    scheduler = workload.scheduler()
    known: dict[tuple[int, int, Form], str | None] = {}
    reasons: dict[int, str] = {}
    for row in workload.trace.requests:
        form = workload.forms.of(row)
        alike = (row.prompt_tokens, _output_tokens(workload, row, form), form)
        if alike not in known:
            known[alike] = scheduler.never_fits(_request(workload, row))
        reason = known[alike]
        if reason:
            reasons[row.request_id] = reason
    return reasons


def _refusal(workload: Workload, reasons: dict[int, str]) -> str:
    request_id, reason = next(iter(reasons.items()))
    row = next(row for row in workload.trace.requests if row.request_id == request_id)
    return (
        f"{len(reasons)} of {len(workload.trace.requests)} requests can never fit; the first is request {request_id} "
        f"({row.prompt_tokens} prompt + {row.output_tokens} output tokens), which {reason}. Raise cache.pool_tokens "
        "or cache.max_model_len, lower workload.length_scale or decoding.beam_width, set workload.widths=configured "
        "where a row's own width is too large, or set workload.oversize=drop"
    )


def with_recorded_beams(config: RunConfig, workload: Workload) -> Workload:
    """The workload whose beams are replayed where the configuration names a recording; raises ConfigError."""
    path = config.decoding.beam_parents
    if path is None:
        return workload
    parents = recorded_parents(path, workload.trace, workload.forms)
    return replace(workload, chance=replace(workload.chance, parents=parents))
