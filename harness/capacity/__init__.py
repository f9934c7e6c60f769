"""Capacity: the highest rate, the smallest pool or the best block size that meets an SLO.

An SLO is a list of bounds on metrics. A trial simulates the configured point at another rate, pool size or block size,
under one seed. A search bisects for the edge between candidates that meet the SLO and candidates that do not. Every
seed searches on its own, in a process of its own where that is worth it; `estimate` gives the mean over the seeds and
its interval. Three questions use the search: the highest rate, the smallest pool, the best block size. `page` writes
the answer, `advice` asks more of a trace.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from harness.config.errors import ConfigError, UserError
from harness.config.memory import workers_that_fit
from harness.config.schema import EngineDevice, Oversize, ReplayMode, RunConfig, WeightDtype
from harness.metrics import METRICS
from harness.point.cost import cost_model
from harness.workers import in_workers
from harness.workload.deployment import deployment_of, model_shape
from harness.workload.point import NEVER_FITS, resolve
from harness.workload.simulate import predict

_GOAL = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*")
# Requests that were left out: by the trace reader, or longer than the model takes. They break no goal.
DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Goal:
    """`metric` must be at most `bound` if `upper`, otherwise at least `bound`, in the metric's unit."""

    metric: str
    bound: float
    upper: bool

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether a run meets the goal. A run without the metric (for example, no output of two tokens) meets it."""
        value = metrics.get(self.metric)
        if value is None:
            return True
        return value <= self.bound if self.upper else value >= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.upper else '≥'} {self.bound:g} {METRICS[self.metric].unit}"


Slo = tuple[Goal, ...]
# Outcomes that break every SLO, in words.
LOST = {
    "rejected": "were rejected",
    "unfinished": "did not finish",
    NEVER_FITS: "never fit the pool and the limits of the scheduler",
}


def parse_slo(text: str) -> Slo:
    """The goals of a text such as 'ttft_p99<2,tpot_mean<0.05'. Raises UserError if it cannot be read."""
    goals = []
    for part in text.split(","):
        found = _GOAL.fullmatch(part)
        if not found:
            raise UserError(
                f"--slo: '{part.strip()}' is no goal; write METRIC<NUMBER or METRIC>NUMBER, as ttft_p99<2"
            )
        name, sign, number = found.groups()
        if name not in METRICS:
            raise UserError(f"--slo: there is no metric '{name}'; {_like(name)}")
        bound = _number(number, part)
        if not 0 <= bound < inf or (sign == "<" and not bound):
            reason = f"--slo: '{part.strip()}' can be met by no run, or by every run; no metric is below 0"
            raise UserError(reason)
        goals.append(Goal(name, bound, sign.startswith("<")))
    return tuple(goals)


def _number(text: str, part: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--slo: '{text}' in '{part.strip()}' is no number") from None


def _like(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, METRICS, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "see the report's section on metrics"


def broken_goals(slo: Slo, metrics: Mapping[str, float]) -> Slo:
    """The goals that a run does not meet."""
    return tuple(goal for goal in slo if not goal.holds(metrics))


@dataclass(frozen=True)
class Trial:
    """The result of one candidate under one seed."""

    rate: float | None
    pool_tokens: int | None
    block_size: int
    seed: int
    metrics: Mapping[str, float]
    outcome: Mapping[str, int]
    extrapolated: Mapping[str, Any] | None
    broken: Slo

    @property
    def lost(self) -> int:
        """Requests that did not finish, without those that were left out (`DROPPED`)."""
        return sum(count for name, count in self.outcome.items() if name in LOST)

    @property
    def met(self) -> bool:
        """Whether all requests finished, within every goal."""
        return not self.lost and not self.broken


class Trials:
    """Simulates candidates, judges them by the SLO, and keeps all of them in `made`."""

    def __init__(self, config: RunConfig, slo: Slo) -> None:
        self.config, self.slo = with_drawn_arrivals(config), slo
        self.made: list[Trial] = []

    def run(
        self,
        seed: int,
        *,
        rate: float | None = None,
        pool_tokens: int | None = None,
        block_size: int | None = None,
    ) -> Trial:
        """Simulate one candidate. None leaves a value as configured.

        A request that is longer than the model takes is left out, as a server refuses it whatever its size. A request
        that fits the model and not the pool breaks the SLO.
        """
        config = _varied(self.config, seed, rate, pool_tokens, block_size)
        trial = self._simulated(config)
        self.made.append(trial)
        return trial

    def _simulated(self, config: RunConfig) -> Trial:
        try:
            point = resolve(config)
        except ConfigError as error:
            if error.key not in ("workload.oversize", "cache.pool_tokens"):
                raise
            return self._trial(config, {}, {NEVER_FITS: config.workload.num_requests or 1}, None)
        dropped = dict(point.trace.header.dropped)
        outcome = {NEVER_FITS: dropped.pop(NEVER_FITS, 0), DROPPED: sum(dropped.values())}
        if outcome[NEVER_FITS]:
            return self._trial(config, {}, outcome, None)
        prediction = predict(point, cost_model(point.deployment), rows=False)
        outcome = {**prediction.outcome, **outcome}
        return self._trial(config, prediction.metrics, outcome, prediction.extrapolated)

    def _trial(
        self,
        config: RunConfig,
        metrics: Mapping[str, float],
        outcome: Mapping[str, int],
        extrapolated: Mapping[str, Any] | None,
    ) -> Trial:
        return Trial(
            config.workload.request_rate,
            config.cache.pool_tokens,
            config.cache.block_size,
            config.workload.seed,
            metrics,
            outcome,
            extrapolated,
            broken_goals(self.slo, metrics),
        )


def with_drawn_arrivals(config: RunConfig) -> RunConfig:
    """The configuration with arrivals drawn for each seed: recorded arrivals, a single sample, become Poisson."""
    if config.replay.mode is ReplayMode.trace:
        config = replace(config, replay=replace(config.replay, mode=ReplayMode.poisson))
    return replace(config, measure=False, workload=replace(config.workload, oversize=Oversize.drop))


def _varied(
    config: RunConfig, seed: int, rate: float | None, pool_tokens: int | None, block_size: int | None
) -> RunConfig:
    workload = replace(config.workload, seed=config.workload.seed + seed)
    cache = config.cache
    if rate is not None:
        workload = replace(workload, request_rate=rate)
    if pool_tokens is not None:
        cache = replace(cache, pool_tokens=pool_tokens, pool_blocks=None)
    elif block_size is not None and cache.pool_blocks is not None:  # another size, in the same memory
        cache = replace(cache, pool_tokens=cache.pool_blocks * cache.block_size, pool_blocks=None)
    if block_size is not None:
        cache = replace(cache, block_size=block_size)
    return replace(config, workload=workload, cache=cache)


Meets = Callable[[float], bool]
LOWEST_RATE, HIGHEST_RATE = 1e-3, 1e6
_WORTH_WORKERS_S = 5.0  # of the first seed's search; processes take seconds to start
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Edge:
    """`good` meets the SLO and `bad` does not. None if no tried value was of that kind."""

    good: float | None
    bad: float | None
    tried: int

    @property
    def found(self) -> bool:
        """Whether the edge lies between two values that were tried."""
        return self.good is not None and self.bad is not None


def highest(meets: Meets, start: float, *, precision: float, low: float, high: float) -> Edge:
    """Search the highest value for which `meets` holds.

    The value is doubled or halved from `start` until both kinds are seen, then bisected. The search stops when good and
    bad differ by less than the share `precision`, or at `low` and `high`. If `meets` is not monotone, there are
    several edges; therefore every seed searches on its own.
    """
    tried, value = 1, min(max(start, low), high)
    good, bad = (value, None) if meets(value) else (None, value)
    while bad is None or good is None:
        known = good if bad is None else bad
        assert known is not None
        if (known >= high and bad is None) or (known <= low and good is None):
            return Edge(good, bad, tried)
        value = min(known * 2, high) if bad is None else max(known / 2, low)
        tried += 1
        good, bad = (value, bad) if meets(value) else (good, value)
    while bad / good > 1 + precision:
        value = float(np.sqrt(good * bad))
        tried += 1
        good, bad = (value, bad) if meets(value) else (good, value)
    return Edge(good, bad, tried)


def smallest(meets: Callable[[int], bool], *, start: int, high: int) -> int | None:
    """The smallest whole number from 1 to `high` for which `meets` holds; None if `high` fails.

    The number is doubled or halved from `start` until both kinds are seen, then bisected.
    """
    value = min(max(start, 1), high)
    if meets(value):
        while value > 1 and meets(value // 2):
            value //= 2
        low, high = value // 2 + 1, value
    else:
        while not meets(min(2 * value, high)):
            if 2 * value >= high:
                return None
            value *= 2
        low, high = value + 1, min(2 * value, high)
    while low < high:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle + 1
    return high


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of the seeds' answers with its Student interval. A single seed has no interval."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The estimate from one answer for each seed. Needs at least one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None, None, tuple(values))
    from scipy.stats import t

    spread = float(np.std(values, ddof=1)) / len(values) ** 0.5
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * spread
    return Estimate(mean, mean - half, mean + half, tuple(values))


@dataclass(frozen=True)
class CapacityAnswer:
    """The result of a search: the value with its interval, or the reason why there is none."""

    question: str
    unit: str
    value: Estimate | None
    reason: str = ""
    # (candidate, its answer), where there are several
    choices: tuple[tuple[float, Estimate | None], ...] = ()


@dataclass(frozen=True)
class NoEdge:
    """Why a search found no edge. `endless`: every tried value meets the SLO; otherwise none does."""

    reason: str
    endless: bool


def highest_rate(trials: Trials, seeds: int, precision: float, tell: Tell) -> CapacityAnswer:
    """The highest request rate that meets the SLO."""
    question, unit = "highest request rate that meets the SLO", "requests/s"
    found = _rates(trials, seeds, precision, tell, None)
    if isinstance(found, NoEdge):
        return CapacityAnswer(question, unit, None, found.reason)
    beyond = beyond_peak(trials, found.mean)
    return CapacityAnswer(question, unit, None if beyond else found, beyond)


_NARROW = 4  # the FLOP/s of the narrowest weights (4 bits), as a multiple of the element type's


def beyond_peak(trials: Trials, rate: float) -> str:
    """Why no device of this kind can serve `rate` requests/s for long, by its peak FLOP/s; empty where it may.

    The work of a request is two operations for each weight of a token and each token that was computed for it.
    """
    config, device = trials.config, trials.config.device
    met = [trial for trial in trials.made if trial.met and trial.metrics.get("computed_tokens")]
    if device.name == EngineDevice.cpu.value or not met:
        return ""
    last = max(met, key=lambda trial: trial.rate or 0.0)
    tokens = last.metrics["computed_tokens"] / max(1, last.outcome.get("finished", 0))
    needed = 2.0 * model_shape(config.model).token_weights * tokens * rate
    narrow = 1 if config.model.weight_dtype is WeightDtype.model else _NARROW
    peak = device.tflops * 1e12 * narrow * device.tensor_parallel * device.data_parallel
    if needed <= peak:
        return ""
    return (
        f"{rate:,.4g} requests/s meet the SLO for the {last.outcome.get('finished', 0):,} requests of a simulation, "
        f"but need {needed / 1e12:,.0f} TFLOP/s of at most {peak / 1e12:,.0f}: a queue grows that so few requests do "
        "not show. Use more requests (workload.num_requests)"
    )


def _rates(
    trials: Trials, seeds: int, precision: float, tell: Tell, block_size: int | None
) -> Estimate | NoEdge:
    """One edge for each seed.

    Raises:
        ConfigError: the client holds requests back, so that no rate is too high for the server.
    """
    replay = trials.config.replay
    if replay.mode in (ReplayMode.closed, ReplayMode.offline) or replay.max_in_flight:
        key, held = ("max_in_flight", replay.max_in_flight) if replay.max_in_flight else ("mode", replay.mode)
        raise ConfigError(
            f"replay.{key}", f"{held}, so the client sets the rate and none can be searched for"
        )
    start, edges = trials.config.workload.request_rate or 1.0, []
    search = _RateSearch(precision, block_size)
    for seed, edge in enumerate(_of_seeds(trials, seeds, search, start)):
        if edge.good is None:
            missed = why_not(trials.made[-1])
            return NoEdge(
                f"not even {LOWEST_RATE:g} requests/s meet the SLO (seed {seed}). {missed}", endless=False
            )
        if edge.bad is None:
            return NoEdge(f"{HIGHEST_RATE:g} requests/s still meet the SLO (seed {seed})", endless=True)
        edges.append(edge.good)
        tell(f"seed {seed}: {edge.good:.4g} requests/s, {edge.tried} simulations")
    return estimate(edges)


@dataclass(frozen=True)
class _RateSearch:
    """The search of one seed for the highest rate."""

    precision: float
    block_size: int | None

    def __call__(self, trials: Trials, seed: int, start: float) -> Edge:
        def meets(rate: float) -> bool:
            return trials.run(seed, rate=rate, block_size=self.block_size).met

        return highest(meets, start, precision=self.precision, low=LOWEST_RATE, high=HIGHEST_RATE)


@dataclass(frozen=True)
class _PoolSearch:
    """The search of one seed for the smallest pool, in blocks."""

    block_size: int
    largest: int

    def __call__(self, trials: Trials, seed: int, start: float) -> Edge:
        def meets(blocks: int) -> bool:
            return trials.run(seed, pool_tokens=blocks * self.block_size).met

        return Edge(smallest(meets, start=int(start), high=self.largest), None, 0)


_Search = Callable[[Trials, int, float], Edge]


def _of_seeds(trials: Trials, seeds: int, search: _Search, start: float) -> Iterator[Edge]:
    """The edges of the seeds, in order. The first seed starts at `start`, the others at its edge.

    The others are searched in `workers` processes (0: one a core, if the first took so long that it is worth them).
    The answers do not depend on their number. All trials are in `trials.made`, in the order of the seeds.
    """
    begun = time.monotonic()
    first = search(trials, 0, start)
    took = time.monotonic() - begun
    yield first
    asked, others = trials.config.workers, range(1, seeds)
    wanted = asked or (os.cpu_count() or 1 if took > _WORTH_WORKERS_S else 1)
    workers = min(workers_that_fit(trials.config, wanted), len(others))
    jobs = [_Job(search, Trials(trials.config, trials.slo), seed, first.good or start) for seed in others]
    for edge, made in in_workers(_searched, jobs, workers):
        trials.made += made
        yield edge


@dataclass(frozen=True)
class _Job:
    search: _Search
    trials: Trials
    seed: int
    start: float


def _searched(job: _Job) -> tuple[Edge, list[Trial]]:
    return job.search(job.trials, job.seed, job.start), job.trials.made


# A pool search ends at so many times the larger of the configured pool and what the device's memory holds.
BEYOND = 8


def device_blocks(config: RunConfig) -> int | None:
    """Blocks that the device's memory holds beside the weights; None where that is not known."""
    try:
        return deployment_of(replace(config, cache=replace(config.cache, pool_tokens=None))).pool.num_blocks
    except ConfigError:
        return None


def smallest_pool(trials: Trials, seeds: int, tell: Tell) -> CapacityAnswer:
    """The smallest pool, in whole blocks, that meets the SLO at the configured rate.

    It may be larger than the configured pool, and larger than the device's memory; the answer says so then.
    """
    question, unit = "smallest pool that meets the SLO", "tokens"
    pool, held = deployment_of(trials.config).pool, device_blocks(trials.config)
    largest = BEYOND * max(pool.num_blocks, held or 0)
    found: list[float] = []
    search = _PoolSearch(pool.block_size, largest)
    for seed, edge in enumerate(_of_seeds(trials, seeds, search, pool.num_blocks)):
        if edge.good is None:
            tokens = largest * pool.block_size
            reason = f"not even {tokens:,} tokens meet the SLO (seed {seed}), {BEYOND} times what is there. "
            return CapacityAnswer(question, unit, None, reason + why_not(trials.made[-1]))
        found.append(edge.good * pool.block_size)
        tell(f"seed {seed}: {edge.good:,.0f} blocks of {pool.block_size}")
    beyond = held is not None and max(found) > held * pool.block_size
    device = trials.config.device
    reason = (
        f"more than the {held * pool.block_size:,} tokens that {device.name} holds" if held and beyond else ""
    )
    return CapacityAnswer(question, unit, estimate(found), reason)


def why_not(trial: Trial) -> str:
    """Why a trial does not meet the SLO: requests that did not finish, or the goals that it breaks, in words."""
    lost = [
        f"{count:,} requests {LOST[name]}" for name, count in trial.outcome.items() if count and name in LOST
    ]
    broken = [f"{goal.metric} is {trial.metrics[goal.metric]:.3g}" for goal in trial.broken]
    return "There " + " and ".join([*lost, *broken]) if lost or broken else ""


def best_block_size(
    trials: Trials, sizes: Sequence[int], seeds: int, precision: float, tell: Tell
) -> CapacityAnswer:
    """The block size with the highest rate. `choices` has the rates of all sizes; their intervals may overlap.

    If a size meets the SLO at any rate, there is no best size.
    """
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise UserError("--block-sizes: at least two sizes to choose from, of 1 token or more")
    choices: list[tuple[float, Estimate | None]] = []
    failed: dict[int, NoEdge] = {}
    for size in sorted(set(sizes)):
        tell(f"blocks of {size}")
        found = _rates(trials, seeds, precision, tell, size)
        if isinstance(found, NoEdge):
            failed[size] = found
        choices.append((size, None if isinstance(found, NoEdge) else found))
    rates = {size: rate for size, rate in choices if rate is not None}
    question = "block size with the highest rate that meets the SLO"
    if not rates or any(edge.endless for edge in failed.values()):
        reason = "; ".join(f"blocks of {size}: {edge.reason}" for size, edge in failed.items())
        return CapacityAnswer(question, "tokens", None, reason, tuple(choices))
    best = max(rates, key=lambda size: (rates[size].mean, -size))
    return CapacityAnswer(question, "tokens", estimate([best]), _lead(rates, best), tuple(choices))


def _lead(rates: Mapping[float, Estimate], best: float) -> str:
    """A warning that the best size is not clearly better than some others, or an empty string."""
    top = rates[best]
    alike = [
        size
        for size, rate in rates.items()
        if size != best and (rate.high or rate.mean) >= (top.low if top.low is not None else top.mean)
    ]
    return (
        f"not clearly better than {', '.join(f'{size:g}' for size in sorted(alike))}: the intervals overlap"
        if alike
        else ""
    )


def curve(trials: Trials, middle: float, seeds: int, points: int = 7) -> list[Trial]:
    """The trials made so far from half to one and a half of `middle`, and more between them, for the picture."""
    rates = [middle * (0.5 + place / (points - 1)) for place in range(points)]
    near = [trial for trial in trials.made if rates[0] <= (trial.rate or 0.0) <= rates[-1]]
    return near + [trials.run(seed, rate=rate) for rate in rates for seed in range(min(seeds, 2))]
