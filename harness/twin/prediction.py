"""What the simulation says of a deployment: the times of each request and the engine's state, in the log's terms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from math import isfinite, nan

import numpy as np

from harness.config.errors import ConfigError
from harness.config.schema import DeviceConfig, RunConfig
from harness.metrics.log import Outcome, RunLog
from harness.point.bands import beyond, possible
from harness.point.cost import cost_model
from harness.twin.log import EngineLog, FloatArray, IntArray, LoggedRequests, Timeseries, tpot_s
from harness.twin.sharing import cached_before
from harness.workload.point import Point, resolve
from harness.workload.simulate import often_replayed, simulate
from traces.trace import Trace


@dataclass(frozen=True)
class PredictedRun:
    """The simulated run of a deployment's requests. Request i is the i-th of the deployment; times in seconds."""

    # when the first step began after the server's front end: what an engine logs as the entry
    seen_s: FloatArray
    arrival_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    output_tokens: FloatArray
    log: RunLog

    def ttft_s(self, measured: LoggedRequests) -> FloatArray:
        """Seconds to the first token, from where `measured` counts: the entry to the queue, or the arrival."""
        begin = self.arrival_s if measured.queued_s is None else self.seen_s
        return self.first_token_s[: len(measured)] - begin[: len(measured)]

    @property
    def tpot_s(self) -> FloatArray:
        """Mean seconds between the tokens of each request; nan for a request of one token."""
        return tpot_s(self.first_token_s, self.last_token_s, self.output_tokens)

    def series(self, at_s: FloatArray) -> Timeseries:
        """Running and waiting requests and the share of the pool in use, at each instant."""
        if self.log.replicas > 1:
            return self._series_of_replicas(at_s)
        running, waiting = self._at(at_s, "running"), self._at(at_s, "waiting")
        return Timeseries(at_s, running, waiting, self._at(at_s, *_IN_USE) / self.log.capacity_slots)

    def token_use(self, at_s: FloatArray) -> FloatArray:
        """Tokens over slots of blocks in use at each instant, of one replica; 0 where none is."""
        shares: FloatArray = self._at(at_s, "token") / np.maximum(1.0, self._at(at_s, *_IN_USE))
        return shares

    def _at(self, at_s: FloatArray, *columns: str) -> FloatArray:
        """The sum of some columns of the step that runs at each instant; 0 outside the run."""
        steps = self.log.steps
        place = np.searchsorted(np.asarray(steps["start_s"], np.float64), at_s, side="right") - 1
        total = np.sum([np.asarray(steps[name], np.float64) for name in columns], axis=0)
        return np.where((place >= 0) & (at_s < self.log.span_s), total[np.maximum(place, 0)], 0.0)

    def _series_of_replicas(self, at_s: FloatArray) -> Timeseries:
        """The same for all replicas together, counted from the times of the requests: a step shows one replica alone.

        A preempted request counts as running, and the use of the pools is not known.
        """

        def before(column: str) -> FloatArray:
            times = np.sort(np.asarray(self.log.requests[column], dtype=np.float64))
            return np.searchsorted(times, at_s, side="right").astype(np.float64)

        started = before("first_scheduled_s")
        return Timeseries(at_s, started - before("finish_s"), before("arrival_s") - started)


_IN_USE = ("token", "internal", "reserved", "external")  # slots of blocks that some request holds
Predict = Callable[[DeviceConfig], PredictedRun]


def predictor(config: RunConfig, workload: Trace) -> Predict:
    """A function from a device to the prediction for the requests of `workload`.

    The workload is built once: a device that differs in its rates and times alone changes nothing else. `config` gives
    model, engine settings and the pool.

    Raises:
        ConfigError: a request of the log can never be served with these settings.
    """
    built = point_of(config, workload)

    def predict(device: DeviceConfig) -> PredictedRun:
        return _prediction(replace(built, deployment=replace(built.deployment, device=device)))

    return predict


def others(config: RunConfig, workload: Trace, found: PredictedRun) -> Iterator[PredictedRun]:
    """The predictions of what the deployment may be as well, from which bands are made (`harness.point.bands`).

    `found` is the prediction itself, whose steps may be larger than those that a fit has seen.
    Where no log was fitted and nothing is known of what the prompts share, an earlier run may have left them in the
    cache: every third prediction has them there.

    Raises:
        ConfigError: as `predictor`.
    """
    new = point_of(config, workload)
    described = config.device.fitted_from is None and config.cache.prefix_caching
    cached = cached_before(workload, new.deployment.pool.whole_tokens) if described else None
    again = repeat(None) if cached is None else possible(point_of(config, cached))
    drawn = possible(new, beyond(new, found.log.steps))
    for number, (one, other) in enumerate(zip(drawn, again, strict=False)):
        yield _prediction(one if other is None or number % _MAY_BE_CACHED else other)


_MAY_BE_CACHED = 3


def point_of(config: RunConfig, workload: Trace) -> Point:
    """The point that simulates the requests of `workload`.

    Raises:
        ConfigError: a request of the log can never be served with these settings.
    """
    built = resolve(config, workload)
    if missing := len(workload.requests) - len(built.trace.requests):
        raise ConfigError(
            "workload.oversize",
            f"{missing} of {len(workload.requests)} requests of the log can never be served with these settings, but "
            "the engine served them; check cache.max_model_len, the pool and scheduler.max_batched_tokens",
        )
    return built


def _prediction(point: Point) -> PredictedRun:
    cost = cost_model(point.deployment)
    # a fit simulates a log some hundred times, five times as often as is meant there
    log = simulate(often_replayed(point, cost, 5 * len(point.trace.requests)), cost)
    rows = log.requests
    place = {int(name): at for at, name in enumerate(rows["request_id"])}
    order = np.array([place[row.request_id] for row in point.trace.requests])
    columns = {name: np.asarray(rows[name], dtype=np.float64)[order] for name in _COLUMNS}
    if (columns["outcome"] != Outcome.FINISHED).any():
        reason = "the simulation rejects requests that the engine served; check the engine's settings"
        raise ConfigError("scheduler", reason)
    start = np.asarray(log.steps["start_s"], dtype=np.float64)
    prompts = np.array([row.prompt_tokens for row in point.trace.requests])
    entered = columns["arrival_s"] + point.deployment.front_end_s(prompts)
    began = start[np.minimum(np.searchsorted(start, entered - _NS), len(start) - 1)]
    return PredictedRun(
        seen_s=np.minimum(began, columns["first_scheduled_s"]),
        arrival_s=columns["arrival_s"],
        first_token_s=columns["first_token_s"],
        last_token_s=columns["finish_s"],
        output_tokens=columns["output_tokens"],
        log=log,
    )


_NS = 1e-9
_COLUMNS = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s", "output_tokens", "outcome")


@dataclass(frozen=True)
class Errors:
    """How a prediction differs from a log. Signed shares: -0.1 is 10 % too low. `requests` counts those compared.

    nan: the log's value is 0, or no request has one. The median over requests leaves out those with a 0 in the log.
    """

    requests: int
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    ttft_mean: float = nan
    ttft_p99: float = nan
    tpot_mean: float = nan
    tpot_p99: float = nan

    @property
    def size(self) -> float:
        """Root mean square of medians and means in units of the goals of an open loop: 2 % of TPOT, 3 % of TTFT."""
        tpot = (error / 0.02 for error in (self.tpot_p50, self.tpot_mean))
        ttft = (error / 0.03 for error in (self.ttft_p50, self.ttft_mean))
        shares = [share for share in (*tpot, *ttft) if isfinite(share)]
        return float(np.sqrt(np.mean(np.square(shares)))) if shares else nan

    def __str__(self) -> str:
        """The signed errors of the medians, the means and the 99th percentiles."""
        shown = {
            f"{family} {which}": getattr(self, f"{family.lower()}_{which}")
            for which in ("p50", "mean", "p99")
            for family in ("TPOT", "TTFT")
        }
        return ", ".join(
            f"{name} {100 * value:+.1f} %" if isfinite(value) else f"{name} unknown"
            for name, value in shown.items()
        )


def compared(predicted: PredictedRun, measured: LoggedRequests, *, ordered: bool) -> list[FloatArray]:
    """The predicted seconds to the first token and per token that stand beside those of each measured request.

    Where the order in which requests were sent is not known (`ordered=False`), those that ran `together` are compared
    by rank: the shortest time of ours beside the shortest measured one.
    """
    ttft, tpot = predicted.ttft_s(measured), predicted.tpot_s[: len(measured)]
    if ordered:
        return [ttft, tpot]
    group = together(measured)
    return [_by_rank(ttft, measured.ttft_s, group), _by_rank(tpot, measured.tpot_s, group)]


def together(measured: LoggedRequests) -> IntArray:
    """A number for each request: that of the requests that ran with nothing in flight before and after them."""
    apart = measured.entered_s[1:] >= np.maximum.accumulate(measured.last_token_s)[:-1]
    return np.concatenate([[0], np.cumsum(apart)])


def _by_rank(ours: FloatArray, theirs: FloatArray, group: IntArray) -> FloatArray:
    found = np.empty_like(ours)
    found[np.lexsort((theirs, group))] = ours[np.lexsort((ours, group))]
    return found


def errors_of(predicted: PredictedRun, log: EngineLog, chosen: slice | IntArray) -> Errors:
    """The errors over the requests of a slice, or at places, in order of their entry."""
    measured = log.requests
    ttft, tpot = (each[chosen] for each in compared(predicted, measured, ordered=not log.assumes_pauses))
    true_ttft, true_tpot = measured.ttft_s[chosen], measured.tpot_s[chosen]
    ours, theirs = figures_of_times(ttft, tpot), figures_of_times(true_ttft, true_tpot)
    errors = {name: ours[name] / true - 1 if true > 0 else nan for name, true in theirs.items()}
    return Errors(requests=len(true_ttft), **errors)


_FEWEST = 10  # requests of a part whose errors are said


def errors_by_part(prediction: PredictedRun, log: EngineLog, places: IntArray) -> list[str]:
    """The errors of the requests at `places`, in sentences by their load and by the lengths of their prompts."""
    requests = log.requests.take(places)
    running, waiting = log.requests.under_way(requests.entered_s)
    found = []
    for name, values in (
        ("in flight when they came", running + waiting),
        ("prompt tokens", requests.prompt_tokens),
    ):
        middle = float(np.median(values))
        for words, chosen in (
            (f"at most {middle:,.0f} {name}", values <= middle),
            (f"more than {middle:,.0f} {name}", values > middle),
        ):
            if chosen.sum() >= _FEWEST:
                errors = errors_of(prediction, log, places[chosen])
                found.append(f"{errors.requests:,} requests with {words}: {errors}")
    return found


def figures_of_times(ttft_s: FloatArray, tpot_s: FloatArray) -> dict[str, float]:
    """Median, mean, 90th and 99th percentile in seconds, by metric; nan where no request has one.

    A request of one token has no TPOT, given as nan.
    """
    found = {}
    for family, values in (("ttft", ttft_s), ("tpot", tpot_s[~np.isnan(tpot_s)])):
        for which, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found[f"{family}_{which}"] = float(np.quantile(values, share)) if len(values) else nan
        found[f"{family}_mean"] = float(values.mean()) if len(values) else nan
    return found
