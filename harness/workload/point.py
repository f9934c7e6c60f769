"""A point: what serves (`Deployment`), what arrives (`Workload`), and how it is replayed. `resolve` makes it, once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from engine.core.identity import BlockIdentity, KeyIdentity
from engine.core.memory.eviction import EvictionPolicy
from engine.core.memory.paged import host_memory
from engine.core.options import Decoding, SchedulerLimits, Sharing
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.compiled.replay import Waiting
from harness.config.capabilities import Asked, Way, refusals
from harness.config.checks import NO_INDIRECTION
from harness.config.errors import ConfigError
from harness.config.schema import (
    CacheConfig,
    OracleConfig,
    Oversize,
    ReplayConfig,
    ReplayMode,
    RunConfig,
    SchedulerConfig,
)
from harness.replay.arrivals import LATEST_NS, Arrivals, FrontEnd, FrontTimes, Resubmitting, TimedRequest
from harness.replay.beams import Genealogy
from harness.replay.cost_model import CostSource
from harness.replay.memory import MemoryObserver
from harness.workload.beam_requests import BeamClient, KeyedBeams, requests_sent
from harness.workload.decoding import (
    DrawnOutcomes,
    RequestDecoding,
    TraceDecoding,
    drawn_outcomes_of,
    names_widths,
    recorded_parents,
    trace_decoding_of,
)
from harness.workload.deployment import Deployment, PoolShape, deployment_of
from harness.workload.scheduler import new_scheduler, observed_scheduler
from harness.workload.trace import Traffic, reshaped_trace, retimed, shared_as_asked, traffic_of, turns_before
from traces.errors import TraceError
from traces.formats.kv_events import msgpack
from traces.reshape import drop_oversize, keyed_text, one_request_per_sample
from traces.trace import Requests, Segment, SegmentColumns, Trace, TraceRequest

Identify = Callable[[TraceRequest], BlockIdentity]


@dataclass(frozen=True)
class Workload:
    """What arrives: the requests of a trace, how each is decoded and sent, and what only token values decide.

    `trace.header.dropped` counts the requests that were left out, by reason. With `resubmits` beams are served by a
    client (`Point.beam_client`), which sends requests of one sequence. `seed` is that of token ids and samples.
    """

    trace: Trace
    trace_decoding: TraceDecoding = TraceDecoding()  # noqa: RUF009  # frozen
    traffic: Traffic = Traffic()  # noqa: RUF009  # frozen
    drawn: DrawnOutcomes = DrawnOutcomes()  # noqa: RUF009  # frozen
    resubmits: bool = False
    seed: int = 0

    @property
    def decoding(self) -> Decoding:
        """The decoding of requests whose rows do not name one."""
        return self.trace_decoding.configured.mode

    @property
    def width(self) -> int:
        """Sequences of a request whose row does not name its width."""
        return self.trace_decoding.configured.width

    @cached_property
    def decodings(self) -> set[RequestDecoding]:
        """The different decodings of the requests."""
        return self.trace_decoding.different(self.trace)

    @cached_property
    def waiting(self) -> Waiting | None:
        """What its requests wait for; None where they come at their times."""
        rows, traffic = self.trace.columns, self.traffic
        if traffic.mode is not ReplayMode.closed and not traffic.turns:
            return None
        pauses = np.array(traffic.pauses_ns(rows), dtype=np.int64)
        if traffic.mode is ReplayMode.closed:
            return Waiting(pauses, traffic.users)
        place = {request_id: index for index, request_id in enumerate(rows.request_id.tolist())}
        after = [{place[parent] for parent in turns_before(row) if parent in place} for row in rows]
        return Waiting(pauses, after=after)

    @property
    def client_stride(self) -> int:
        """A number greater than the id of every row."""
        return 1 + int(self.trace.columns.request_id.max())

    def genealogy(self, source: CostSource) -> Genealogy:
        """The parents of beams: recorded, or drawn as the calibration found them."""
        return self.drawn.genealogy(source, self.width)


@dataclass(frozen=True)
class Point:
    """A deployment and a workload, and how the one is replayed on the other: what is predicted and measured.

    `scheduler()` makes a scheduler over an empty pool, `requests()` or `stream()` the requests.
    """

    deployment: Deployment
    workload: Workload
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    oracle: OracleConfig = field(default_factory=OracleConfig)
    name: str = "default"

    @property
    def trace(self) -> Trace:
        """The trace of the workload."""
        return self.workload.trace

    @property
    def pool(self) -> PoolShape:
        """The KV memory of the deployment."""
        return self.deployment.pool

    @property
    def limits(self) -> SchedulerLimits:
        """The scheduler's limits of the deployment."""
        return self.deployment.limits

    @property
    def replicas(self) -> int:
        """Data-parallel engines, each with its own pool."""
        return self.deployment.device.data_parallel

    @property
    def asked(self) -> Asked:
        """What the point asks for, as the table of capabilities has it."""
        served = self.deployment
        decodings = self.workload.decodings
        return Asked(
            *(served.model, served.engine, served.device, served.cache, served.scheduler, served.decoding),
            self.replay,
            oracle=self.oracle.engine,
            several=any(each.width > 1 for each in decodings),
            sampled=any(each.mode is Decoding.sample for each in decodings),
            drafts=any(each.speculation is not None for each in decodings),
            may_share=served.cache.deduplicate and self.may_share,
            experts=served.shape.experts is not None,
            waits=self.workload.traffic.waits,
        )

    @property
    def may_share(self) -> bool:
        """Whether two prompts may share a block."""
        prompts, size = self.trace.columns.segments, self.pool.block_size
        begun = np.flatnonzero(prompts.is_keyed[prompts.first[:-1]]) if self.pool.prefix_caching else ()
        return any(shares_block(row, size) for row in (self.trace.columns[place] for place in begun))

    def of_trace(self, trace: Trace) -> "Point":
        """The same with other requests."""
        return replace(self, workload=replace(self.workload, trace=trace))

    @property
    def host_blocks(self) -> int:
        """Blocks of host memory that the copies of its scheduler name, without groups of layers."""
        return host_memory(self.scheduler().manager)

    def scheduler(self) -> Scheduler:
        """A scheduler over an empty pool.

        Raises:
            ConfigError: a class of the user cannot be imported or made, or lacks a method.
        """
        return new_scheduler(self.deployment)

    def observed_scheduler(
        self, clock: Callable[[], int], eviction: EvictionPolicy | None = None
    ) -> tuple[Scheduler, list[MemoryObserver]]:
        """A scheduler over an empty pool, and the observers of its memory that the replay keeps.

        `clock` gives the time in ns; `eviction` replaces the eviction order.
        """
        return observed_scheduler(self.deployment, self.replay, clock=clock, eviction=eviction)

    def beam_client(self, genealogy: Genealogy) -> KeyedBeams | None:
        """The client that sends the beams of these requests; None where the engine itself serves beams."""
        return KeyedBeams(self.workload.client_stride, genealogy) if self.workload.resubmits else None

    def arrivals(self, requests: Iterable[TimedRequest], client: BeamClient | None = None) -> Arrivals:
        """The source of `requests`, one for each row of the trace in order; or of what `client` sends for them.

        Each passes the server's front end before the scheduler sees it.
        """
        rows = self.trace.requests
        source = self.workload.traffic.arrivals(rows, requests)
        if client is not None:
            total = sum(requests_sent(_request(self, row)) for row in rows)
            source = Resubmitting(source, client, total)
        return source if self.front_times is None else FrontEnd(source, *self.front_times)

    @property
    def front_times(self) -> FrontTimes | None:
        """What the server's front end takes; None where nothing is known of one."""
        device = self.deployment.device
        times = (device.frontend_request_us, device.frontend_token_us, device.frontend_turn_us)
        request, token, turn = times
        return FrontTimes(round(1000 * request), 1000 * token, round(1000 * turn)) if any(times) else None

    def requests(self, identify: Identify | None = None) -> list[TimedRequest]:
        """The requests in order of arrival; blocks are identified by prefix keys, or as `identify` says."""
        return list(self.stream(identify))

    def stream(self, identify: Identify | None = None) -> Iterator[TimedRequest]:
        """The same one by one, for traces that should not be in memory as a whole."""
        identify = identify or self._by_keys
        for row in self.trace.requests:
            yield TimedRequest(_request(self, row, identify(row)), row.arrival_us * 1000)

    def _by_keys(self, row: TraceRequest) -> BlockIdentity:
        if self.workload.resubmits:
            return KeyIdentity(row.request_id, keyed_text(row), row.salt)
        output = None
        if self.deployment.cache.answers and row.output_key is not None:
            output = row.output_key, row.output_tokens
        return KeyIdentity(row.request_id, row.segments, row.salt, output=output)


def shares_block(row: TraceRequest, block_size: int) -> bool:
    """Whether another request may share the first block of `row`."""
    keyed = 0
    for segment in row.segments:
        if segment.key is None or keyed >= block_size:
            break
        keyed += segment.tokens
    return keyed >= block_size


def _request(
    point: Point,
    row: TraceRequest,
    identity: BlockIdentity | None = None,
    decoding: RequestDecoding | None = None,
) -> Request:
    decoding = decoding or point.workload.trace_decoding.of(row)
    return Request(
        row.request_id,
        row.prompt_tokens,
        _output_tokens(point, row, decoding),
        decoding.width,
        decoding.mode,
        identity,
        priority=row.priority,
        speculation=decoding.speculation,
        session=row.session,
        arrival_ns=row.arrival_us * 1000,
    )


def _output_tokens(point: Point, row: TraceRequest, decoding: RequestDecoding) -> int:
    """Output tokens of the trace; where the ends of sampled branches are drawn, those of the longest branch."""
    survival = point.workload.drawn.survival
    never_runs = decoding.width > point.limits.max_running
    if survival is None or decoding.mode is not Decoding.sample or never_runs:
        return row.output_tokens
    return max(survival.length(row.request_id, branch, row.output_tokens) for branch in range(decoding.width))


def resolve(config: RunConfig, recorded: Trace | None = None) -> Point:
    """The point that a configuration describes; `recorded` replaces the trace that it names, and is not reshaped.

    Raises:
        ConfigError: a request can never fit and `workload.oversize` is `error`, or settings do not fit together.
    """
    point = served_point(config, recorded)
    return one_by_one(shared_point(point, config), config) if recorded is None else point


def shared_point(point: Point, config: RunConfig) -> Point:
    """The point with as much sharing as `workload.prefix_share` asks for among what is left of its requests.

    Raises:
        ConfigError: they cannot share so much.
    """
    drops = config.workload.oversize is Oversize.drop
    return point.of_trace(shared_as_asked(point.trace, config)) if drops else point


def one_by_one(point: Point, config: RunConfig) -> Point:
    """The point with a request for each sample, where the prefix cache shares their prompt."""
    if config.decoding.sharing is not Sharing.prefix_cache or point.workload.resubmits:
        return point
    rows, decodings = point.trace.columns.request_id.tolist(), trace_decoding_of(config).of_all(point.trace)
    widths = {request_id: each.width for request_id, each in zip(rows, decodings, strict=True)}
    return point.of_trace(one_request_per_sample(point.trace, widths))


def served_point(config: RunConfig, recorded: Trace | None = None) -> Point:
    """The point with the requests that can be served, as they stand in the trace. Raises ConfigError as `resolve`."""
    deployment = deployment_of(config)
    trace_decoding, drawn = trace_decoding_of(config), drawn_outcomes_of(config)
    trace = recorded or reshaped_trace(config)
    traffic = traffic_of(config, trace.header.client)
    resubmits = _client_sends_beams(config, trace, trace_decoding)
    trace = trace_decoding.noted(recorded or retimed(trace, config))
    if resubmits:
        trace = trace.changed(trace.requests, _RESUBMITTED)
    elif config.decoding.sharing is Sharing.prefix_cache and recorded is None:
        trace_decoding = TraceDecoding(replace(trace_decoding.configured, width=1), recorded=False)
    _check_span(trace)
    workload = Workload(trace, trace_decoding, traffic, drawn, resubmits, config.workload.seed)
    point = Point(deployment, workload, config.replay, config.oracle, config.name)
    grouped = config.measure and point.pool.groups is not None
    for way, is_on, head in (
        (Way.client, resubmits, "beams that a client sends (decoding.sharing=prefix_cache)"),
        (Way.replicas, point.replicas > 1, f"device.data_parallel={point.replicas}"),
        (Way.vllm, deployment.measured and deployment.engine.on_vllm, "engine=vllm"),
        (Way.measured_groups, grouped, f"measure=true and cache.groups={config.cache.groups}"),
    ):
        if is_on and (refused := next(refusals(point.asked, way, head), None)):
            raise refused
    if config.replay.kv_events:
        try:
            msgpack()
        except TraceError as error:
            raise ConfigError("replay.kv_events", error.reason) from error
    if reasons := _oversize(point):
        if config.workload.oversize is Oversize.error:
            raise ConfigError("workload.oversize", _refusal(point, reasons))
        rows = _without_texts(trace)
        too_long = rows.take(np.flatnonzero(np.isin(rows.request_id, list(reasons))))
        left = drop_oversize(trace, {row.request_id: _kind(point, row) for row in too_long})
        if not left.requests:
            raise ConfigError("workload.oversize", f"no request fits: {_refusal(point, reasons)}")
        point = point.of_trace(left)
    before_s = int(point.trace.columns.arrival_us[:1].sum()) / 1e6
    if recorded is None and before_s:  # a process that draws arrivals begins with one
        sentence = f"times from the first request on: the {before_s:g} s before it count in no rate"
        point = point.of_trace(point.trace.changed(point.trace.columns.from_first(), sentence))
    if recorded is None:
        point = point.of_trace(_rate_noted(point.trace, config))
    if (path := config.decoding.beam_parents) is not None:
        drawn = replace(drawn, parents=recorded_parents(path, point.trace, trace_decoding))
        point = replace(point, workload=replace(point.workload, drawn=drawn))
    return point


_SAME_RATE = 0.05  # of the rate that was asked for


def _rate_noted(trace: Trace, config: RunConfig) -> Trace:
    """The trace of an open loop with a note where its requests come at another rate than was asked for.

    The console says it (`harness.report.verdict_text.UNREAD`). `capacity` and `advise` scale to the rate itself.
    """
    asked, real = config.workload.request_rate or 0.0, trace.mean_rate or 0.0
    closed = config.replay.mode in (ReplayMode.closed, ReplayMode.offline)
    if closed or not asked or not real or abs(real / asked - 1) <= _SAME_RATE:
        return trace
    times = f"requests come at {real / asked:.3g} times the rate asked for (workload.request_rate)"
    return trace.changed(trace.requests, f"{times}, as few arrivals are drawn, or some were dropped")


_RESUBMITTED = (
    "a client sends a request for the prompt, and for each beam and further token one more (decoding.sharing="
    "prefix_cache): rates, hits and latencies are those of these requests"
)


def _client_sends_beams(config: RunConfig, trace: Trace, trace_decoding: TraceDecoding) -> bool:
    """Whether beams are sent as requests (`harness.workload.beam_requests`).

    Raises:
        ConfigError: the engine has no such beams, or the trace has samples too, which the prefix cache serves in
            another way.
    """
    sharing = config.decoding.sharing
    if sharing is Sharing.copy_on_write:
        return False
    decodings = trace_decoding.different(trace)
    if all(each.mode is not Decoding.beam for each in decodings):
        return False
    if sharing is Sharing.tail_at_fork:
        if config.measure:
            raise ConfigError("decoding.sharing", NO_INDIRECTION)
        return False
    if any(each.width > 1 and each.mode is Decoding.sample for each in decodings):
        reason = "prefix_cache, but the requests of the trace have samples and beams; set workload.widths=configured"
        raise ConfigError("decoding.sharing", reason)
    return True


def _check_span(trace: Trace) -> None:
    """Check that the last request arrives within the range of the replay's clock; raises ConfigError."""
    last_us = int(trace.columns.arrival_us.max(initial=0))
    if last_us * 1000 > LATEST_NS:
        raise ConfigError(
            "workload.request_rate",
            f"the last of {len(trace.requests):,} requests arrives after {last_us / 1e6 / 86400 / 365:,.0f} years, "
            "and replays count 146; take fewer requests or a higher rate",
        )


def _oversize(point: Point) -> dict[int, str]:
    """Reasons by request id. Requests of equal lengths and decoding are checked once."""
    if point.workload.trace_decoding.configured == RequestDecoding() and _all_fit(point):
        return {}
    scheduler = point.scheduler()
    known: dict[tuple[int, int, RequestDecoding], str | None] = {}
    reasons: dict[int, str] = {}
    for row in _doubtful(point):
        decoding = RequestDecoding() if point.workload.resubmits else point.workload.trace_decoding.of(row)
        alike = (row.prompt_tokens, _output_tokens(point, row, decoding), decoding)
        if alike not in known:
            known[alike] = scheduler.never_fits(_request(point, row, decoding=decoding))
        if reason := known[alike]:
            reasons[row.request_id] = reason
    return reasons


def _doubtful(point: Point) -> Sequence[TraceRequest]:
    """The requests that must be looked at one by one: those that exceed lengths that are known to fit.

    Where every request has one sequence, a shorter one needs no more tokens, blocks and slots.
    """
    rows = _without_texts(point.trace)
    if point.workload.trace_decoding.configured != RequestDecoding() or names_widths(point.trace):
        return rows
    prompts, outputs = rows.prompt_tokens, rows.output_tokens
    prompt, output = (int(np.quantile(lengths, _USUAL)) for lengths in (prompts, outputs))
    usual = TraceRequest(0, 0, prompt, output, (Segment(None, prompt),))
    if point.scheduler().never_fits(_request(point, usual)) is not None:
        return rows
    return rows.take(np.flatnonzero((prompts > prompt) | (outputs > output)))


_USUAL = 0.995  # of the lengths


def _without_texts(trace: Trace) -> Requests:
    """The requests with their lengths alone: a row with all its segments takes ten times as long to make."""
    rows = trace.columns
    return replace(rows, segments=SegmentColumns.private(rows.prompt_tokens))


def _all_fit(point: Point) -> bool:
    """Whether it is known, without a look at every request, that all fit; each has one sequence."""
    hardest = _front(point.trace)
    lengths = tuple((row.prompt_tokens, row.output_tokens) for row in hardest)
    asked = (point.pool, id(point.deployment.cache), id(point.deployment.scheduler), lengths)
    if not hardest or asked in _FITTING:
        return bool(hardest)
    scheduler = point.scheduler()
    fits = all(scheduler.never_fits(_request(point, row)) is None for row in hardest)
    if fits:
        if len(_FITTING) >= _MOST_REMEMBERED:
            _FITTING.clear()
        _FITTING[asked] = point.deployment.cache, point.deployment.scheduler
    return fits


# What fits: pool, options and lengths of the hardest requests; the options are held, so that their ids stay their own.
_FITTING: dict[
    tuple[PoolShape, int, int, tuple[tuple[int, int], ...]], tuple[CacheConfig, SchedulerConfig]
] = {}
_MOST_REMEMBERED = 1 << 12


def _front(trace: Trace) -> Sequence[TraceRequest]:
    """The requests that no other exceeds in both prompt and output; none where rows have widths of their own.

    Where every request has one sequence, each needs no more tokens, blocks and slots than one of these.
    """
    if names_widths(trace):
        return ()
    rows = trace.columns
    order = np.lexsort((-rows.output_tokens, -rows.prompt_tokens))
    outputs = rows.output_tokens[order]
    longest_before = np.maximum.accumulate(outputs) if len(order) else outputs
    return rows.take(order[np.diff(longest_before, prepend=0) > 0])


TOO_LONG, NEVER_FITS = "longer_than_the_model", "never_fits"
"""Why a request is dropped: the model (`cache.max_model_len`) takes no such sequence, or pool and limits do not."""


def _kind(point: Point, row: TraceRequest) -> str:
    longest = point.limits.max_model_len
    total = row.prompt_tokens + _output_tokens(point, row, point.workload.trace_decoding.of(row))
    return TOO_LONG if longest is not None and total > longest else NEVER_FITS


def _refusal(point: Point, reasons: dict[int, str]) -> str:
    request_id, reason = next(iter(reasons.items()))
    row = point.trace.requests[int(np.flatnonzero(point.trace.columns.request_id == request_id)[0])]
    return (
        f"{len(reasons)} of {len(point.trace.requests)} requests can never fit; the first is request {request_id} "
        f"({row.prompt_tokens} prompt + {row.output_tokens} output tokens), which {reason}. Raise cache.pool_tokens "
        "or cache.max_model_len, lower workload.length_scale or decoding.beam_width, set workload.widths=configured "
        "where a row's own width is too large, or set workload.oversize=drop"
    )
