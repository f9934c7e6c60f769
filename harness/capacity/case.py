"""A case: a deployment under the requests of a trace, at any rate and with other settings; what of the trace that is.

`advise` and `capacity` ask a `LoadCase`, and nothing else simulates for them. A `Trial` is the answer for one rate and
some changed settings. A rate is that of the requests that are served: their recorded times are scaled, as
`workload.request_rate` does. A trial meets the SLO only if all requests finish within every goal, and if the number of
requests in the server does not grow while they arrive (`growth`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Any

import numpy as np

from engine.core.options import Sharing
from harness.capacity.slo import LATENCIES, Slo, broken_goals
from harness.config.errors import ConfigError, UserError
from harness.config.schema import Compiled, EngineDevice, Oversize, ReplayMode, RunConfig, TraceFormat
from harness.config.values import replaced
from harness.metrics.log import FloatArray, RunLog
from harness.point.bands import possible_devices
from harness.point.cost import at_end, cost_model
from harness.replay.cost_model import CostModel
from harness.workload.deployment import deployment_of, max_position
from harness.workload.point import NEVER_FITS, TOO_LONG, Point, one_by_one, served_point, shared_point
from harness.workload.simulate import obstacle, often_replayed, predict
from harness.workload.trace import reshaped_trace, retimed
from traces.analysis.reuse import shared_prefix_tokens
from traces.reshape import repeated, sampled, set_rate
from traces.trace import Requests, Trace

# Fewer requests than this are too little data for an answer.
FEWEST = 30
# Requests that are simulated of a longer trace, and where layers are in groups: compiled, and by the policy core.
MOST_COMPILED, MOST_IN_CORE = (20_000, 5_000), (2_000, 500)
_MEAN_STAYS = 20.0  # mean stays in the server that the arrivals must span, so that growth shows
_SHOWN_EXCESS = 0.05  # a load so much above what is served must break a bound within the arrivals
_LEAST_HIDDEN = 0.06  # of the load that is served; what is worth saying
_WINDOWS = 10  # of the test for growth; the first is the start-up, the last is compared between halves
_SAMPLES = 40  # of a window
_STUDENT = 3.0  # 99 % of Student's t with as many degrees of freedom as the other windows leave
_LEAST_GROWTH = 0.01  # of the arriving requests
_BUSY = 4  # the busiest window has one of so many requests
_LEAST_BUSY = 500
NOT_SAMPLED = "not in the windows that are simulated (advise --requests takes more)"
LOST = {
    "rejected": "were rejected",
    "unfinished": "did not finish",
    NEVER_FITS: "never fit the pool and the limits of the scheduler",
}
"""Outcomes that break every SLO, in words."""


@dataclass(frozen=True)
class Scope:
    """What is simulated of what; tokens are those of prompts and outputs, -1 where they are not known.

    `left_out` has requests and tokens by reason. With the simulated requests they are all `requests` of the source.
    """

    requests: int
    tokens: int
    simulated: int
    simulated_tokens: int
    left_out: Mapping[str, tuple[int, int]]
    window: str = ""
    unread: str = ""  # of the file, in words

    def __str__(self) -> str:
        """The first line of every answer."""
        share = f"{_percent(self.simulated_tokens, self.tokens)} of the tokens"
        of_all = f"all {self.requests:,} requests"
        if self.left_out or self.unread:
            of_all = f"{self.simulated:,} of {self.requests:,} requests with {share}"
        parts = [f"Simulated: {of_all}" + (f", {self.window}." if self.window else ".")]
        parts += [
            f"Left out: {count:,} ({_percent(count, self.requests)})"
            + (f" with {_percent(tokens, self.tokens)} of the tokens" if tokens >= 0 else "")
            + f", {reason}."
            for reason, (count, tokens) in self.left_out.items()
        ]
        parts += [f"These are {self.unread} (workload.num_requests)."] if self.unread else []
        return " ".join(parts)


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if not 0 < share < 1 and not 99 < share < 100 else f"{share:.3g} %"


@dataclass(frozen=True)
class Trial:
    """The result of one candidate under one seed. `changes` are its settings by key, beside those of the case.

    `growth` is the share of the arriving requests by which the number in the server grows; 0: it does not. `end` is the
    end of what the device's description or fit leaves open: slow, fast, or empty for neither.
    """

    rate: float | None
    changes: Mapping[str, Any]
    seed: int
    metrics: Mapping[str, float]
    outcome: Mapping[str, int]
    extrapolated: Mapping[str, Any] | None
    broken: Slo
    growth: float = 0.0
    span_s: float = 0.0
    end: str = ""
    step_tokens: float = inf  # the largest step's
    spare_slots: float = 0.0  # of the pool, in the step with the fewest that no request holds
    copies: int = 1  # of the requests, sent one after the other
    always: float = 0.0  # share of the requests that are in the server at any time after the start-up
    busiest: bool = False  # of the busiest window alone

    @property
    def lost(self) -> int:
        """Requests that did not finish."""
        return sum(count for name, count in self.outcome.items() if name in LOST)

    @property
    def met(self) -> bool:
        """Whether all requests finished, within every goal, and no queue grew."""
        return not self.lost and not self.broken and not self.growth

    def worst(self, slo: Slo) -> float:
        """The figure of the SLO that is farthest from its bound, as a multiple of it; infinite if requests are lost.

        Where the number in the server grows, a load above what is served counts as a figure above its bound.
        """
        shares = [goal.share(self.metrics) for goal in slo]
        return inf if self.lost else max([*shares, 1 + self.growth if self.growth else 0.0])

    def why(self) -> str:
        """Why it does not meet the SLO, in words; empty if it does."""
        lost = {LOST[name]: count for name, count in self.outcome.items() if count and name in LOST}
        found = [f"{count:,} requests {became}" for became, count in lost.items()]
        found += [
            f"{name} is {self.metrics[name]:.3g}" if name in self.metrics else f"there is no {name}"
            for name in (goal.metric for goal in self.broken)
        ]
        if self.growth:
            found.append(f"requests in the server grow by {100 * self.growth:.0f} % of those that arrive")
        return " and ".join(found)


@dataclass(frozen=True)
class _Part:
    """The case's requests under some settings and a seed, and as they are sent; `missing` cannot be served then."""

    point: Point
    missing: int
    requests: Trace


@dataclass
class LoadCase:
    """A configuration, an SLO, and requests: those of the configuration, or `recorded` ones.

    `requests` is the most that a trial simulates; None: as many as take seconds. `made` has all trials.
    """

    config: RunConfig
    slo: Slo
    recorded: Trace | None = None
    requests: int | None = None
    made: list[Trial] = field(default_factory=list)
    _parts: dict[Any, _Part] = field(default_factory=dict, repr=False, init=False)
    _known: dict[Any, Trial] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        """Nothing is measured, and requests that cannot be served are counted. Raises UserError for no requests."""
        if self.requests is not None and self.requests < 1:
            raise UserError("--requests: must be at least 1")
        alone: dict[str, Any] = dict.fromkeys(("measure", "replay.optimum", "replay.kv_events"), False)
        alone |= {"replay.residency": None, "workload.oversize": Oversize.drop}
        self.config = replaced(self.config, alone)

    # -- what is simulated ---------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Trace:
        """All requests of the source, as they would be sent."""
        return self.recorded or retimed(reshaped_trace(self.config), self.config)

    @cached_property
    def served(self) -> Point | None:
        """The requests that this deployment can serve; None if there are none."""
        try:
            return served_point(self.config, self.recorded)
        except ConfigError as error:
            if error.key != "workload.oversize":
                raise
            return None

    @cached_property
    def trace(self) -> Trace:
        """The requests that are simulated. Raises UserError if there are none; the scope says why."""
        if self.served is None:
            raise UserError("no answer, because no request is left to simulate")
        return self._part({}, 0).point.trace

    @property
    def most(self) -> int:
        """How many requests are simulated at most."""
        if self.requests is not None or self.served is None:
            return self.requests or 1
        in_core = self.config.replay.compiled is Compiled.never
        in_core = in_core or obstacle(self.served, cost_model(self.served.deployment)) is not None
        return (MOST_IN_CORE if in_core else MOST_COMPILED)[self.served.pool.groups is not None]

    @cached_property
    def scope(self) -> Scope:
        """What is simulated of what, and why not all."""
        whole, rows = self.whole, self.whole.columns
        left = {f"dropped by the reader: {why}": (count, -1) for why, count in whole.header.dropped.items()}
        served = self.served.trace.columns if self.served else rows[:0]
        lost = rows.take(np.flatnonzero(~np.isin(rows.request_id, served.request_id)))
        longest = self.config.cache.max_model_len or max_position(self.config.model)
        is_too_long = lost.prompt_tokens + lost.output_tokens > longest
        is_too_long &= self.served is None or TOO_LONG in self.served.trace.header.dropped
        too_long, others = (lost.take(np.flatnonzero(these)) for these in (is_too_long, ~is_too_long))
        if too_long:
            text = f"longer than the {longest:,} tokens that {self.config.model.name} takes here"
            left[text + self._who_takes(too_long)] = len(too_long), _tokens(too_long)
        if others:
            left["which never fit the pool or the limits of the scheduler"] = len(others), _tokens(others)
        part = self._part({}, 0) if self.served else None
        kept = part.requests.columns if part else served
        if len(kept) < len(served):
            left[NOT_SAMPLED] = len(served) - len(kept), _tokens(served) - _tokens(kept)
        window = _window(part.point.trace) if part else ""
        if part and len(part.point.trace.requests) > len(kept):
            window = f"sent as {len(part.point.trace.requests):,} requests of one sample each, {window}"
        unread = next((one for one in whole.header.changes if one.startswith("the first ")), "")
        every = len(rows) + sum(whole.header.dropped.values())
        return Scope(every, _tokens(rows), len(kept), _tokens(kept), left, window, unread)

    def _who_takes(self, rows: Requests) -> str:
        """The preset of the same shape that takes the longest of `rows`, or what else would."""
        from harness.capacity.flags import longer_preset

        lengths = rows.prompt_tokens + rows.output_tokens
        needed, shortest = int(lengths.max()), int(lengths.min())
        own = max_position(self.config.model)
        if needed <= own:
            return f"; cache.max_model_len={needed} takes them"
        name, takes = longer_preset(self.config, needed)
        if name is None or takes < shortest:
            return ""
        return f"; model={name} takes " + ("them" if takes >= needed else f"those of up to {takes:,}")

    @property
    def rate(self) -> float | None:
        """Requests per second that are served at the times of the trace; None where all arrive at once."""
        return self.trace.mean_rate

    @property
    def held_back(self) -> str:
        """What sets the rate instead of the arrivals, in words; empty where nothing does."""
        replay, client = self.config.replay, self.whole.header.client
        if replay.mode in (ReplayMode.closed, ReplayMode.offline):
            return f"replay.mode={replay.mode}"
        most = client.max_in_flight if replay.max_in_flight is None else replay.max_in_flight
        if most:
            return f"the client has at most {most:,} requests in flight"
        return "" if self.rate else "all requests arrive at one instant"

    @property
    def draws(self) -> bool:
        """Whether another seed gives other requests or arrivals."""
        trace, mode, share = self.config.trace, self.config.replay.mode, self.config.workload.prefix_share
        drawn = mode in (ReplayMode.poisson, ReplayMode.gamma) or share is not None
        return self.recorded is None and (drawn or trace.format is TraceFormat.generated)

    @property
    def has_ends(self) -> bool:
        """Whether it is known how far the cost model may be wrong."""
        if self.served is None:
            return False
        deployment = self.served.deployment
        assumed = at_end(deployment, cost_model(deployment), fastest=True)
        return assumed is not None or bool(possible_devices(deployment))

    @cached_property
    def _fitted_ends(self) -> Mapping[str, int]:
        """The places of the slowest and of the fastest of the devices that the log of a fit allows.

        They are ordered by the figure of the SLO that is worst in the busiest requests, as these come.
        """
        assert self.served is not None
        point = self.served.of_trace(busiest_window(self.trace))
        shares = []
        for device in possible_devices(point.deployment):
            deployment = replace(point.deployment, device=device)
            found = predict(replace(point, deployment=deployment), cost_model(deployment), rows=False).metrics
            shares.append(max(goal.share(found) for goal in self.slo))
        return {"slow": int(np.argmax(shares)), "fast": int(np.argmin(shares))}

    def _at_end(self, point: Point, cost: CostModel, end: str) -> tuple[Point, CostModel]:
        """The point and its prices at the slow or fast end of what its device's description or fit leaves open."""
        assumed = at_end(point.deployment, cost, end == "fast")
        if assumed is not None or not self.has_ends:
            return point, assumed or cost
        device = possible_devices(point.deployment)[self._fitted_ends[end]]
        deployment = replace(point.deployment, device=device)
        return replace(point, deployment=deployment), cost_model(deployment)

    # -- trials --------------------------------------------------------------------------------------------

    def run(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        rate: float | None = None,
        seed: int = 0,
        busiest: bool = False,
        copies: int | None = None,
        end: str = "",
    ) -> Trial:
        """Simulate one candidate. None leaves the rate as it is.

        With `busiest` only the window with the most tokens a second is simulated, of which growth is not judged. The
        requests are sent `copies` times; None: until growth shows, and twice as often where it may be the load's own,
        or be hidden by a load that falls.
        `end` takes the fast or slow end of what is left open of the device. A request that fits the case and not these
        settings breaks the SLO.

        Raises:
            ConfigError: a setting is not allowed.
        """
        changes = changes or {}
        try:
            part = self._part(changes, seed)
        except ConfigError as error:
            if error.key not in ("workload.oversize", "cache.pool_tokens"):
                raise
            outcome = {NEVER_FITS: len(self.trace.requests)}
            return self._kept(Trial(rate, changes, seed, {}, outcome, None, ()))
        trace = part.point.trace
        if rate is not None:
            trace = set_rate(trace, rate)
        if busiest:
            found = self._simulated(part, busiest_window(trace), rate, changes, seed, end)
            return self._kept(replace(found, busiest=True, growth=0.0))
        copies = 1 if self.held_back else copies
        first = copies or self._copies(trace, self._least_span_s)
        trial = self._simulated(part, repeated(trace, first), rate, changes, seed, end)
        more = copies or self._copies(trace, self._wanted_s(trial))
        if not copies and (trial.growth or (first % 2 and trial.always > 1 / _MEAN_STAYS)):  # halves tell
            more = 2 * max(first, ceil(more / 2))
        if more > first and replace(trial, growth=0.0).met:
            trial = self._simulated(part, repeated(trace, more), rate, changes, seed, end)
        return self._kept(trial)

    def _kept(self, trial: Trial) -> Trial:
        self.made += [] if any(one is trial for one in self.made) else [trial]
        return trial

    @cached_property
    def _least_span_s(self) -> float:
        """So long must requests arrive that a load above what is served breaks a bound on latency.

        Raises UserError for a bound on the span, which is longer the longer they arrive.
        """
        if any(goal.metric == "span" for goal in self.slo):
            raise UserError("--slo: the span of a load at a rate is that of its arrivals; bound e2e_p99")
        bounds = [goal.bound for goal in self.slo if goal.upper and goal.metric in LATENCIES]
        return max(bounds, default=0.0) / _SHOWN_EXCESS

    def _copies(self, trace: Trace, span_s: float) -> int:
        """How often the trace is sent, one time after the other, to span so many seconds."""
        count = len(trace.requests)
        return max(1, min(ceil(span_s * (trace.mean_rate or 0.0) / count), self.most // count))

    def _wanted_s(self, trial: Trial) -> float:
        """How long requests must arrive so that a load which is a little too high shows."""
        return max(self._least_span_s, _MEAN_STAYS * trial.metrics.get("e2e_mean", 0.0))

    def hidden(self, trial: Trial) -> str:
        """What a trial that meets the SLO may hide because its requests arrive in too short a time; empty: little."""
        count, span_s = trial.outcome.get("finished", 0), trial.span_s
        share = _SHOWN_EXCESS * self._wanted_s(trial) / max(span_s, 1e-6)
        if share <= _LEAST_HIDDEN:
            return ""
        less = _percent(share, 1 + share)
        return f"That rests on {count:,} requests in {span_s:,.0f} s: over more time up to {less} less may be served"

    def _part(self, changes: Mapping[str, Any], seed: int) -> _Part:
        known = tuple(sorted(changes.items())), seed
        if known not in self._parts:
            seeds = {"workload.seed": self.config.workload.seed + seed} if seed else {}
            config = replaced(self.config, {**in_the_same_memory(self.config, changes), **seeds})
            if not changes:
                point = served_point(config, self.recorded) if seed or self.served is None else self.served
                sent = point = point.of_trace(sampled(point.trace, self.most))
                if self.recorded is None:
                    point = shared_point(point, config)
                    sent = one_by_one(point, config)
                self._parts[known] = _Part(sent, 0, point.trace)
            else:  # the same requests, as they are sent
                base = self._part({}, seed)
                again = config.decoding.sharing is Sharing.prefix_cache
                point = served_point(config, self.recorded if again else base.requests)
                missing = len(base.requests.requests) - int(
                    np.isin(base.requests.columns.request_id, point.trace.columns.request_id).sum()
                )
                self._parts[known] = _Part(point.of_trace(base.point.trace), missing, base.requests)
        return self._parts[known]

    def _simulated(
        self, part: _Part, trace: Trace, rate: float | None, changes: Mapping[str, Any], seed: int, end: str
    ) -> Trial:
        if part.missing:
            return Trial(rate, changes, seed, {}, {NEVER_FITS: part.missing}, None, ())
        rows = trace.columns
        same = *sorted(changes.items()), rate, seed, end, int(rows.request_id[0]), len(rows)
        if same not in self._known:
            copies = len(rows) // len(part.point.trace.requests)
            # no rate has the time before the first
            started = part.point.of_trace(replace(trace, requests=rows.from_first()))
            self._known[same] = self._replayed(started, copies, rate, changes, seed, end)
        return self._known[same]

    def _replayed(
        self, point: Point, copies: int, rate: float | None, changes: Mapping[str, Any], seed: int, end: str
    ) -> Trial:
        cost, arrival_us = cost_model(point.deployment), point.trace.columns.arrival_us
        point = often_replayed(point, cost, max(len(self.trace.requests), len(arrival_us)))
        if end:
            point, cost = self._at_end(point, cost, end)
        found = predict(point, cost, rows=True)
        grows = 0.0 if self.held_back else growth(found.log, copies > 0 and copies % 2 == 0)
        broken = broken_goals(self.slo, found.metrics)
        span_s, steps = float(arrival_us[-1] - arrival_us[0]) / 1e6, found.log.steps
        largest = float((steps["prefill_tokens"] + steps["decode_rows"]).max(initial=0))
        spare = float((steps["free"] + steps["cached"]).min(initial=point.pool.tokens))
        always = float(_windows(found.log).min()) / len(arrival_us)
        facts = found.metrics, found.outcome, found.extrapolated, broken, grows, span_s, end, largest
        return Trial(rate, changes, seed, *facts, spare_slots=spare, copies=copies, always=always)

    # -- what no simulation needs to show -------------------------------------------------------------------

    @cached_property
    def shared(self) -> list[int]:
        """For each request, the leading prompt tokens that stood in an earlier one."""
        return shared_prefix_tokens(self.trace)

    @cached_property
    def most_rate(self) -> tuple[float, str]:
        """Requests per second that no device of this kind serves for long, and of what it has too little.

        A request takes two operations for each weight and each token that is computed; and each of its output tokens,
        or as many as drafts make of one step, reads the KV of all before it in layers without a window. Left out are
        prompt tokens that stood in an earlier prompt, which changes may cache, all where answers are found again, and
        all outputs but one where branches may end. So both are less than what it takes, and the rate is a bound. It
        is infinite for a CPU, whose peak is not known.
        """
        config, rows = self.config, self.trace.columns
        device = config.device
        if device.name == EngineDevice.cpu.value or self.served is None:
            return inf, ""
        shape = self.served.deployment.shape
        prompts = rows.prompt_tokens.astype(np.float64)
        outputs = np.minimum(rows.output_tokens, 1.0 if config.decoding.branch_hazard else inf)
        shared = prompts.sum() if config.cache.answers else sum(self.shared)
        computed = float(prompts.sum() - shared + outputs.sum() - len(rows))
        flop = 2.0 * shape.token_weights * computed / len(rows)
        whole = (shape.attention_layers - shape.windowed_layers) / shape.layers
        reads = float((outputs * (prompts + outputs / 2)).sum()) / (1 + config.decoding.draft_tokens)
        read = whole * shape.kv_bytes_per_token * reads / len(rows)
        many = device.tensor_parallel * device.data_parallel
        by = {
            "FLOP/s": device.tflops * 1e12 * shape.most_flops * many / max(flop, 1.0),
            "bytes/s": device.bandwidth_gbs * 1e9 * many / max(read, 1.0),
        }
        least = min(by, key=lambda name: by[name])
        return by[least], least


def in_the_same_memory(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes; a pool that is given in blocks, or in pages of groups, keeps its memory where their size changes."""
    cache = config.cache
    if "cache.pool_tokens" in changes:
        return {"cache.pool_blocks": None, **changes}
    if "cache.block_size" in changes and cache.pool_blocks is not None:
        tokens = deployment_of(config).pool.whole_tokens
        return {"cache.pool_tokens": tokens, "cache.pool_blocks": None, **changes}
    return dict(changes)


def growth(log: RunLog, halves: bool = False) -> float:
    """The share of the arriving requests by which the number in the server grows while they arrive; 0: not shown, or
    below 1 %.

    Where both `halves` of the requests are the same ones, it is the number at the end of the second half beyond that at
    the end of the first, in means over a tenth of a half: whatever the load does within a half, it does in both.

    Else it grows where the slope over windows of time differs from 0 by Student's test at 99 %.
    """
    arrived = np.sort(log.requests["arrival_s"])
    if halves:
        second = len(arrived) // 2
        last, period = arrived[second - 1], arrived[second] - arrived[0]
        at = np.linspace(last - (last - arrived[0]) / _WINDOWS, last, _SAMPLES)
        share = float(np.diff(_inside(log, np.concatenate([at, at + period])))[0]) / second
        return share if share >= _LEAST_GROWTH else 0.0
    means = _windows(log)
    (slope, _), covariance = np.polyfit(np.arange(len(means)), means, 1, cov=True)
    share = float(slope) * _WINDOWS / len(arrived)  # in a window, a tenth of the time, a tenth arrives
    return share if slope > _STUDENT * covariance[0, 0] ** 0.5 and share >= _LEAST_GROWTH else 0.0


def _windows(log: RunLog) -> FloatArray:
    """The requests in the server in ten windows of equal time while they arrive, but for the first, the start-up."""
    arrived = log.requests["arrival_s"]
    return _inside(log, np.linspace(min(arrived), max(arrived), _SAMPLES * _WINDOWS))[1:]


def _inside(log: RunLog, at: FloatArray) -> FloatArray:
    """The requests in the server in the mean of each 40 of the times `at`, in seconds."""
    arrived, finished = (np.sort(log.requests[name]) for name in ("arrival_s", "finish_s"))
    found = np.searchsorted(arrived, at, "right") - np.searchsorted(finished, at, "right")
    means: FloatArray = found.reshape(-1, _SAMPLES).mean(axis=1)
    return means


def busiest_window(trace: Trace) -> Trace:
    """The quarter of the requests, at least 500, in which most tokens arrive in a second."""
    count = max(_LEAST_BUSY, len(trace.requests) // _BUSY)
    if len(trace.requests) <= count:
        return trace
    rows = trace.columns
    tokens = np.concatenate([[0], np.cumsum(rows.prompt_tokens + rows.output_tokens)])
    at = rows.arrival_us.astype(np.float64)
    seconds = np.maximum(at[count - 1 :] - at[: len(at) - count + 1], 1.0)
    first = int(np.argmax((tokens[count:] - tokens[:-count]) / seconds))
    sentence = f"its busiest {count:,} requests, from number {first:,} on"
    return trace.changed(trace.requests[first : first + count], sentence)


def _tokens(rows: Requests) -> int:
    return int((rows.prompt_tokens + rows.output_tokens).sum())


def _window(trace: Trace) -> str:
    """The span of the requests, their rate, and when they are busiest."""
    if not trace.mean_rate:
        return "all at one instant"
    at_us = trace.columns.arrival_us
    span_s = float(at_us[-1] - at_us[0]) / 1e6
    text = f"{span_s:,.0f} s at {trace.mean_rate:.3g} requests/s"
    window = busiest_window(trace)
    if window is trace:
        return text
    first, last = (window.columns.arrival_us[[0, -1]] / 1e6).tolist()
    times = _tokens(window.columns) / max(last - first, 1e-6) / (_tokens(trace.columns) / span_s)
    return f"{text}; busiest from {first:,.0f} to {last:,.0f} s with {times:.2g} times the mean tokens/s"
