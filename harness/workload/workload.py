"""The workload of a point: the trace, how it is decoded and sent, and the pool, without requests that never fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.core.identity import BlockIdentity, KeyIdentity
from engine.core.memory.eviction import EvictionQueue
from engine.core.memory.keeping import KeepQueue, TurnOf
from engine.core.memory.residency import ResidencySampler
from engine.core.options import Decoding, Keep, SchedulerLimits, Sharing
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.config.checks import NO_INDIRECTION
from harness.config.errors import ConfigError
from harness.config.schema import CacheConfig, Compiled, Oversize, RunConfig, SchedulerConfig
from harness.config.values import PerObject
from harness.replay.arrivals import Arrivals, Resubmitting, TimedRequest
from harness.replay.beams import Genealogy
from harness.replay.virtual_time import LATEST_NS
from harness.workload.beam_requests import BeamClient, KeyedBeams, requests_sent
from harness.workload.decoding import (
    SHORT,
    RequestDecoding,
    TraceDecoding,
    keyed_text,
    names_widths,
    one_request_per_sample,
    resubmitted,
    trace_decoding_of,
)
from harness.workload.drawn import DrawnOutcomes, drawn_outcomes_of, recorded_parents
from harness.workload.policies import limits_of, new_scheduler
from harness.workload.shapes import PoolShape, pool_shape
from harness.workload.trace import reshaped_trace
from harness.workload.traffic import Traffic, retimed, traffic_of
from traces.errors import TraceError
from traces.formats.kv_events import msgpack
from traces.reshape import drop_oversize
from traces.trace import Segment, Trace, TraceRequest, revised

Identify = Callable[[TraceRequest], BlockIdentity]


@dataclass(frozen=True)
class Workload:
    """The requests, the pool and the options that a point replays.

    `scheduler()` makes a scheduler over an empty pool, `requests()` or `stream()` the requests.
    """

    trace: Trace
    pool: PoolShape
    limits: SchedulerLimits
    trace_decoding: TraceDecoding = TraceDecoding()  # noqa: RUF009  # frozen
    traffic: Traffic = Traffic()  # noqa: RUF009  # frozen
    cache: CacheConfig = field(default_factory=CacheConfig)  # the options of the cache policy
    batching: SchedulerConfig = field(default_factory=SchedulerConfig)  # a user's own policies
    drawn: DrawnOutcomes = DrawnOutcomes()  # noqa: RUF009  # frozen
    compiled: Compiled = Compiled.auto
    replicas: int = 1  # data-parallel engines, each with its own pool
    kv_events: bool = False  # keep every change of the prefix cache
    lookups: bool = False  # and every lookup
    shared_outputs: bool = (
        False  # later prompts find the blocks of answers that the trace names (`output_key`)
    )
    residency: float | None = None  # share of the blocks whose residency is sampled
    sharing: Sharing = Sharing.copy_on_write  # how samples and beams share blocks
    resubmits: bool = (
        False  # beams are served by a client (`beam_client`), which sends requests of one sequence
    )
    optimum: bool = False  # compute the hits of the best order of eviction

    @property
    def decoding(self) -> Decoding:
        """The decoding of requests whose rows do not name one."""
        return self.trace_decoding.configured.mode

    @property
    def width(self) -> int:
        """Sequences of a request whose row does not name its width."""
        return self.trace_decoding.configured.width

    def scheduler(self, eviction: EvictionQueue | None = None) -> Scheduler:
        """A scheduler over an empty pool; `eviction` replaces the eviction order."""
        return new_scheduler(
            self.pool,
            self.limits,
            self.cache,
            self.batching,
            keeps_beams=self.sharing is Sharing.tail_at_fork,
            keep_events=self.kv_events,
            keep_lookups=self.lookups,
            residency=None if self.residency is None else ResidencySampler(self.residency),
            eviction=self._keeping() if eviction is None else eviction,
        )

    def _keeping(self) -> KeepQueue | None:
        """The order of eviction that knows the sessions of the trace; None for the least recently released."""
        cache = self.cache
        if cache.keep is Keep.recent:
            return None
        turns = {
            row.request_id: TurnOf(row.session, row.turn or 1)
            for row in self.trace.requests
            if row.session is not None
        }
        pinned = cache.keep_tokens // self.pool.block_size
        return KeepQueue(cache.keep, turns, seconds=cache.keep_s, pinned=pinned)

    def beam_client(self, genealogy: Genealogy) -> KeyedBeams | None:
        """The client that sends the beams of these requests; None where the engine itself serves beams."""
        return KeyedBeams(self.client_stride, genealogy) if self.resubmits else None

    @property
    def client_stride(self) -> int:
        """A number greater than the id of every row."""
        return 1 + max(row.request_id for row in self.trace.requests)

    def arrivals(self, requests: Iterable[TimedRequest], client: BeamClient | None = None) -> Arrivals:
        """The source of `requests`, one for each row of the trace in order; or of what `client` sends for them."""
        rows = self.trace.requests
        source = self.traffic.arrivals(rows, requests)
        if client is None:
            return source
        return Resubmitting(source, client, sum(requests_sent(_request(self, row)) for row in rows))

    def requests(self, identify: Identify | None = None) -> list[TimedRequest]:
        """The requests in order of arrival; blocks are identified by prefix keys, or as `identify` says."""
        return list(self.stream(identify))

    def stream(self, identify: Identify | None = None) -> Iterator[TimedRequest]:
        """The same one by one, for traces that should not be in memory as a whole."""
        identify = identify or self._by_keys()
        for row in self.trace.requests:
            yield TimedRequest(_request(self, row, identify(row)), row.arrival_us * 1000)

    def _by_keys(self) -> Identify:
        if self.resubmits:
            return _by_keyed_text
        return _by_keys_and_answers if self.shared_outputs else _by_keys


def _by_keyed_text(row: TraceRequest) -> BlockIdentity:
    return KeyIdentity(row.request_id, keyed_text(row), row.salt)


def _by_keys(row: TraceRequest) -> BlockIdentity:
    return KeyIdentity(row.request_id, row.segments, row.salt)


def _by_keys_and_answers(row: TraceRequest) -> BlockIdentity:
    output = None if row.output_key is None else (row.output_key, row.output_tokens)
    return KeyIdentity(row.request_id, row.segments, row.salt, output=output)


def _request(
    workload: Workload,
    row: TraceRequest,
    identity: BlockIdentity | None = None,
    decoding: RequestDecoding | None = None,
) -> Request:
    decoding = decoding or workload.trace_decoding.of(row)
    return Request(
        row.request_id,
        row.prompt_tokens,
        _output_tokens(workload, row, decoding),
        decoding.width,
        decoding.mode,
        identity,
        priority=row.priority,
        speculation=decoding.speculation,
    )


def _output_tokens(workload: Workload, row: TraceRequest, decoding: RequestDecoding) -> int:
    """Output tokens of the trace; where the ends of sampled branches are drawn, those of the longest branch."""
    survival = workload.drawn.survival
    never_runs = decoding.width > workload.limits.max_running
    if survival is None or decoding.mode is not Decoding.sample or never_runs:
        return row.output_tokens
    branches = range(decoding.width)
    return max(survival.length(row.request_id, branch, row.output_tokens) for branch in branches)


def build_workload(config: RunConfig, recorded: Trace | None = None) -> Workload:
    """The point's workload; `recorded` replaces the trace that the configuration names, and is not reshaped.

    Raises:
        ConfigError: a request can never fit and `workload.oversize` is `error`, or settings do not fit together.
    """
    pool = pool_shape(config)
    trace_decoding, traffic = trace_decoding_of(config), traffic_of(config)
    limits = limits_of(config.scheduler, pool.max_model_len)
    trace = trace_decoding.noted(recorded or retimed(reshaped_trace(config), config))
    _check_span(trace)
    beams = _has_beams(config, trace, trace_decoding)
    by_prefix = config.decoding.sharing is Sharing.prefix_cache
    resubmits = by_prefix and beams
    if config.measure and config.decoding.sharing is Sharing.tail_at_fork and beams:
        raise ConfigError("decoding.sharing", NO_INDIRECTION)
    if resubmits:
        _check_client(config)
        trace = resubmitted(trace, trace_decoding)
    elif by_prefix and recorded is None:
        trace = one_request_per_sample(trace, trace_decoding)
        single = replace(trace_decoding.configured, width=1)
        trace_decoding = TraceDecoding(single, recorded=False)
    whole = Workload(
        trace,
        pool,
        limits,
        trace_decoding,
        traffic,
        config.cache,
        config.scheduler,
        drawn_outcomes_of(config),
        compiled=config.replay.compiled,
        replicas=config.device.data_parallel,
        kv_events=config.replay.kv_events,
        lookups=config.replay.lookups,
        shared_outputs=config.cache.answers,
        residency=config.replay.residency,
        sharing=config.decoding.sharing,
        resubmits=resubmits,
        optimum=config.replay.optimum,
    )
    _check_kept(config, pool)
    reasons = _oversize(whole)
    if not reasons:
        return with_recorded_beams(config, whole)
    if config.workload.oversize is Oversize.error:
        raise ConfigError("workload.oversize", _refusal(whole, reasons))
    trace = drop_oversize(whole.trace, lambda row: _kind(whole, row) if row.request_id in reasons else None)
    if not trace.requests:
        raise ConfigError("workload.oversize", f"no request fits: {_refusal(whole, reasons)}")
    return with_recorded_beams(config, replace(whole, trace=trace))


def _has_beams(config: RunConfig, trace: Trace, trace_decoding: TraceDecoding) -> bool:
    """Whether a request has beams; not looked up where beams share as all others do."""
    if config.decoding.sharing is Sharing.copy_on_write:
        return False
    return any(trace_decoding.of(row).mode is Decoding.beam for row in trace.requests)


def _check_client(config: RunConfig) -> None:
    """Check what does not go with beams that a client sends as requests; raises ConfigError."""
    cache, replay = config.cache, config.replay
    asked = {
        "cache.answers": (cache.answers, "true"),
        "cache.keep": (cache.keep is not Keep.recent, str(cache.keep)),
        "device.data_parallel": (config.device.data_parallel > 1, str(config.device.data_parallel)),
        "replay.optimum": (replay.optimum, "true"),
    }
    for key, (is_asked, found) in asked.items():
        if is_asked:
            raise ConfigError(
                key,
                f"found {found}, but with decoding.sharing=prefix_cache the requests for beams are none of the trace, "
                "and it does not know them; leave it out, or use decoding.sharing=copy_on_write",
            )


def _check_kept(config: RunConfig, pool: PoolShape) -> None:
    """Check that what is to be kept of the prefix cache exists, and that the run keeps rows; raises ConfigError."""
    replay = config.replay
    for key, value in (
        ("replay.kv_events", replay.kv_events),
        ("replay.lookups", replay.lookups),
        ("replay.residency", replay.residency),
    ):
        word = "true" if value is True else f"{value}"
        if value and not pool.prefix_caching:
            raise ConfigError(
                key, f"{word}, but there is no prefix cache; use cache.policy=paged cache.prefix_caching=true"
            )
        if value and not replay.records:
            raise ConfigError(key, f"{word}, but replay.records=false keeps no rows; use replay.records=true")
    if replay.kv_events:
        try:
            msgpack()
        except TraceError as error:
            raise ConfigError("replay.kv_events", error.reason) from error


def _check_span(trace: Trace) -> None:
    """Check that the last request arrives within the range of the replay's clock; raises ConfigError."""
    last_us = trace.requests[-1].arrival_us if trace.requests else 0
    if last_us * 1000 > LATEST_NS:
        raise ConfigError(
            "workload.request_rate",
            f"the last of {len(trace.requests):,} requests arrives after {last_us / 1e6 / 86400 / 365:,.0f} years, "
            "and replays count 146; take fewer requests or a higher rate",
        )


def _oversize(workload: Workload) -> dict[int, str]:
    """Reasons by request id. Requests of equal lengths and decoding are checked once."""
    if workload.trace_decoding.configured == RequestDecoding() and _all_fit(workload):
        return {}
    scheduler = workload.scheduler()
    known: dict[tuple[int, int, RequestDecoding], str | None] = {}
    reasons: dict[int, str] = {}
    for row in _doubtful(workload):
        decoding = RequestDecoding() if workload.resubmits else workload.trace_decoding.of(row)
        alike = (row.prompt_tokens, _output_tokens(workload, row, decoding), decoding)
        if alike not in known:
            known[alike] = scheduler.never_fits(_request(workload, row, decoding=decoding))
        reason = known[alike]
        if reason:
            reasons[row.request_id] = reason
    return reasons


def _doubtful(workload: Workload) -> Sequence[TraceRequest]:
    """The requests that must be looked at one by one: of a long trace those that exceed lengths that are known to fit.

    Where every request has one sequence, a shorter one needs no more tokens, blocks and slots.
    """
    rows = workload.trace.requests
    plain = workload.trace_decoding.configured == RequestDecoding()
    if len(rows) <= SHORT or not plain or names_widths(rows):
        return rows
    prompts = np.fromiter((row.prompt_tokens for row in rows), np.int64, len(rows))
    outputs = np.fromiter((row.output_tokens for row in rows), np.int64, len(rows))
    prompt, output = (int(np.quantile(lengths, _USUAL)) for lengths in (prompts, outputs))
    usual = revised(rows[0], lengths=(prompt, output), segments=(Segment(None, prompt),))
    if workload.scheduler().never_fits(_request(workload, usual)) is not None:
        return rows
    return [rows[place] for place in np.flatnonzero((prompts > prompt) | (outputs > output))]


_USUAL = 0.995  # of the lengths


def _all_fit(workload: Workload) -> bool:
    """Whether it is known, without a look at every request, that all fit; each has one sequence."""
    hardest = _hardest(workload.trace.requests)
    lengths = tuple((row.prompt_tokens, row.output_tokens) for row in hardest)
    asked = (workload.pool, id(workload.cache), id(workload.batching), lengths)
    if not hardest or asked in _FITTING:
        return bool(hardest)
    scheduler = workload.scheduler()
    fits = all(scheduler.never_fits(_request(workload, row)) is None for row in hardest)
    if fits:
        if len(_FITTING) >= _MOST_REMEMBERED:
            _FITTING.clear()
        _FITTING[asked] = workload.cache, workload.batching
    return fits


# What fits: pool, options and lengths of the hardest requests; the options are held, so that their ids stay their own.
_FITTING: dict[
    tuple[PoolShape, int, int, tuple[tuple[int, int], ...]], tuple[CacheConfig, SchedulerConfig]
] = {}
_MOST_REMEMBERED = 1 << 12


def _front(requests: tuple[TraceRequest, ...]) -> tuple[TraceRequest, ...]:
    """The requests that no other exceeds in both prompt and output; none of a long trace or of rows with own widths.

    Where every request has one sequence, each needs no more tokens, blocks and slots than one of these.
    """
    if len(requests) > SHORT or names_widths(requests):
        return ()
    front: list[TraceRequest] = []
    for row in sorted(requests, key=lambda row: (-row.prompt_tokens, -row.output_tokens)):
        if not front or row.output_tokens > front[-1].output_tokens:
            front.append(row)
    return tuple(front)


_hardest = PerObject(_front, most=64)


TOO_LONG, NEVER_FITS = "longer_than_the_model", "never_fits"
"""Why a request is dropped: the model (`cache.max_model_len`) takes no such sequence, or pool and limits do not."""


def _kind(workload: Workload, row: TraceRequest) -> str:
    longest = workload.limits.max_model_len
    total = row.prompt_tokens + _output_tokens(workload, row, workload.trace_decoding.of(row))
    return TOO_LONG if longest is not None and total > longest else NEVER_FITS


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
    """The workload with recorded beams where `decoding.beam_parents` names a recording; raises ConfigError."""
    path = config.decoding.beam_parents
    if path is None:
        return workload
    parents = recorded_parents(path, workload.trace, workload.trace_decoding)
    return replace(workload, drawn=replace(workload.drawn, parents=parents))
