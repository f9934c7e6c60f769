"""Capacity: the highest rate, the smallest pool or the best block size that meets an SLO, and advice on flags.

`case` simulates a deployment under the requests of a trace. A search bisects for the edge between candidates that meet
the SLO and candidates that do not. Where seeds draw requests or arrivals, each searches on its own, in a process of its
own where that is worth it; a recorded trace has one draw. `advice` searches the flags, `page` writes the answer.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from harness.capacity.case import FEWEST, LoadCase, Trial
from harness.capacity.slo import Slo
from harness.config.errors import ConfigError, UserError
from harness.config.memory import workers_that_fit
from harness.config.schema import RunConfig
from harness.config.values import replaced
from harness.workers import in_workers
from harness.workload.deployment import deployment_of

HIGHEST_RATE = 1e6
SLOWEST = 0.01  # of the trace's own rate: requests that hardly meet
_WORTH_WORKERS_S = 5.0  # of the first seed's search; processes take seconds to start
_FIRST_FACTOR = 1.2  # by which a search leaves its start
_OVERLOADED = 0.9  # of the rate that an overloaded server serves: where the edge is sought first
_STEPS = 1.75  # above the highest good one: an edge that is guessed below is sought one step above
_NEAR = 1.5  # times the bound or its inverse: so near, the steepness at the edge tells where that is
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Edge:
    """`good` meets the SLO and `bad` does not. None if no value was of that kind."""

    good: float | None
    bad: float | None


class Figure(NamedTuple):
    """The answer for one value of a search.

    `worst` is the worst figure as a multiple of its bound; 0 or infinite: it says nothing of the distance to the edge.
    `served` is the most that is served where the value is more than that; 0: it is not more, or not known.
    """

    met: bool
    worst: float
    served: float = 0.0


def highest(
    figure: Callable[[float], Figure],
    start: float,
    *,
    precision: float,
    low: float,
    high: float,
    factor: float = _FIRST_FACTOR,
    steep: float = 0.0,
    flat: float = 1.0,
    known: Mapping[float, Figure] | None = None,
) -> Edge:
    """Search the highest value that meets the SLO; `known` are answers of before.

    Where the worst figure is known to grow with the power `steep` of the value at the edge, one near its bound and
    above `flat` times it tells the edge. Below the bound it may grow more slowly: then the edge is higher than told.

    Each value is taken from where the edge is guessed (`_guess`). Where nothing can be guessed, or a guess was wrong,
    the value is raised or lowered by `factor`, each time by the square of the one before, until both kinds are seen,
    then bisected. The search stops when good and bad differ by less than the share `precision`, or at `low` and `high`.
    If the answers are not monotone, there are several edges; therefore every seed searches on its own.
    """
    tried, wrong, step = dict(known or {}), 0, 1 + precision
    while True:
        good = max((value for value, one in tried.items() if one.met), default=0.0)
        bad = min((value for value, one in tried.items() if not one.met), default=inf)
        if bad <= low or good >= high or (good and bad / good <= step * (1 + 1e-9)):
            return Edge(good or None, None if bad == inf else bad)
        guess = _guess(tried, good, bad, low)
        if guess is None and good < start < bad:
            value = start
        elif good and bad < inf:
            middle = (good * bad) ** 0.5
            if guess is None:
                value, factor = min(good * factor, middle), min(factor**2, HIGHEST_RATE)
            elif bad / good <= step**2 or wrong > 1:
                value = middle
            elif guess <= good * step**_STEPS:
                value = good * step
            else:
                value = bad / step if guess >= bad / step else guess / step**0.5
        elif guess is not None:
            value = min(guess, bad / step)
        else:
            value, factor = good * factor or bad / factor, min(factor**2, HIGHEST_RATE)
        value = min(max(value, low), high)
        one = tried[value] = figure(value)
        wrong = wrong + 1 if guess is not None and one.met != (value <= guess) else 0
        near = min(_NEAR, step**steep)
        if not one.served and max(flat, 1 / near) < one.worst < near:
            edge = value / one.worst ** (1 / steep)
            return Edge(edge / step**0.5, edge * step**0.5)


def _guess(tried: Mapping[float, Figure], good: float, bad: float, low: float) -> float | None:
    """Where the edge may be: a line through the worst figures of both, in logarithms, reaches the bound there.

    An overloaded server's figure says nothing of the edge; the rate that it serves does. Where nothing is good yet and
    a line through two figures reaches the bound below `low`, that comes next.
    """
    if bad == inf:
        return None
    below, above = tried[good].worst if good else 0.0, tried[bad]
    guess = bad / above.worst**0.5 if 0 < above.worst < inf and not above.served else None
    if 0 < below < above.worst < inf:
        guess = bad * (good / bad) ** (log(above.worst) / log(above.worst / below))
    told = sorted(value for value, one in tried.items() if not (one.met or one.served) and one.worst < inf)
    if not good and told[:1] == [bad] and len(told) > 1:
        fall = log(max(tried[told[1]].worst, 1e-9) / above.worst)
        guess = low if fall * log(bad / low) < log(above.worst) * log(told[1] / bad) else guess
    if 0 < above.served < bad:
        guess = min(max(guess or 0.0, _OVERLOADED * above.served), above.served)
    return guess


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
    return low + bisect_left(range(low, high), True, key=meets)


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
    spread = float(np.std(values, ddof=1)) / len(values) ** 0.5
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * spread
    return Estimate(mean, mean - half, mean + half, tuple(values))


@dataclass(frozen=True)
class CapacityAnswer:
    """The result of a search: the value with its interval, or the reason why there is none.

    `band` holds the answer at both ends of what is left open of the device; None: its error is not known. `least` is
    the rate from which goals of at least so much are met; 0: the lowest that is searched meets them. `good` and
    `bad` are the trials on both sides of the edge of the first seed.
    """

    question: str
    unit: str
    value: Estimate | None
    reason: str = ""
    # (candidate, its answer), where there are several
    choices: tuple[tuple[float, Estimate | None], ...] = ()
    band: tuple[float, float] | None = None
    least: float = 0.0
    good: Trial | None = None
    bad: Trial | None = None


@dataclass(frozen=True)
class NoEdge:
    """Why a search found no edge. `endless`: every tried value meets the SLO; otherwise none does."""

    reason: str
    endless: bool


RATE = "highest request rate that meets the SLO"
Changes = Mapping[str, Any]


def too_few(case: LoadCase) -> str:
    """Why nothing is answered from so few requests; empty where there are enough."""
    count = len(case.trace.requests)
    return f"{count} requests are too few to answer from; give {FEWEST} or more" if count < FEWEST else ""


def highest_rate(
    case: LoadCase,
    seeds: int,
    precision: float,
    tell: Tell,
    changes: Changes | None = None,
    start: float | None = None,
    bounds: bool = True,
) -> CapacityAnswer:
    """The highest rate of served requests that meets the SLO and lasts; the search begins at `start`.

    Without `bounds` the replays for its band are left out.

    Raises:
        ConfigError: the client holds requests back, so that no rate is too high for the server.
    """
    unit, changes = "requests/s", changes or {}
    if reason := too_few(case):
        return CapacityAnswer(RATE, unit, None, reason)
    found = _rates(case, seeds, precision, tell, changes, start)
    tried = tried_rates(case, changes, 0)
    most = max((rate for rate, one in tried.items() if one.met), default=0.0)
    bad = tried.get(min((rate for rate, one in tried.items() if rate > most and not one.met), default=inf))
    value, reason = (None, found.reason) if isinstance(found, NoEdge) else (found, "")
    least = _least_rate(case, changes, most) if most else 0.0
    answer = CapacityAnswer(RATE, unit, value, reason, least=least, good=tried.get(most), bad=bad)
    return with_bounds(case, answer, changes) if bounds else answer


def tried_rates(case: LoadCase, changes: Changes, seed: int) -> dict[float, Trial]:
    """The rates that were tried with these changes on all requests."""
    of_all = (one for one in case.made if one.seed == seed and not one.end and not one.busiest)
    return {one.rate: one for one in of_all if one.rate and one.changes == changes}


_SLOW, _FAST = 0.75, 1.2  # of the rate: where the ends are sought first
_END = 0.125  # share at which the search for an end stops


def with_bounds(case: LoadCase, answer: CapacityAnswer, changes: Changes) -> CapacityAnswer:
    """The answer with the rates at the slow and the fast end of what is left open of the device as its band.

    The slow end meets the SLO where the lower one is (0: at no rate), and the fast end does not where the upper one is,
    or no device of the kind serves more.
    """
    if answer.value is None or not case.has_ends:
        return answer
    rate, good, bad, steep = answer.value.mean, answer.good, answer.bad, 0.0
    if good and bad and not bad.growth and 0 < good.worst(case.slo) < bad.worst(case.slo) < inf:
        steep = log(bad.worst(case.slo) / good.worst(case.slo)) / log((bad.rate or inf) / (good.rate or inf))
    search = partial(highest, precision=_END, factor=1 + _END, steep=steep)
    at_slow, at_fast = (partial(_figure, case, changes, 0, end) for end in ("slow", "fast"))
    slow = search(at_slow, rate * _SLOW, low=rate * SLOWEST, high=rate, flat=0.0)
    known, top = {rate: Figure(True, 0.0)}, max(rate, min(HIGHEST_RATE, case.most_rate[0]))
    fast = search(at_fast, rate * _FAST, low=rate, high=top, known=known)
    return replace(answer, band=(slow.good or 0.0, fast.bad or top))


def _figure(
    case: LoadCase, changes: Changes, seed: int, end: str, rate: float, goals: Slo | None = None
) -> Figure:
    """The figure of a rate by `goals`; None: by all of the SLO."""
    trial, goals = case.run(changes, rate=rate, seed=seed, end=end), case.slo if goals is None else goals
    trial = replace(trial, broken=tuple(goal for goal in trial.broken if goal in goals))
    served = max(trial.metrics.get("request_throughput", 0.0), rate * (1 - trial.growth))
    return Figure(trial.met, trial.worst(goals), served if trial.growth else 0.0)


def _least_rate(case: LoadCase, changes: Changes, most: float) -> float:
    """From which rate on goals of at least so much are met, `most` meeting them; 0: the lowest that is searched does.

    It is the highest time between two requests.
    """
    goals = tuple(goal for goal in case.slo if not goal.upper)
    if not goals:
        return 0.0

    def figure(seconds: float) -> Figure:
        return _figure(case, changes, 0, "", 1 / seconds, goals)

    known, most_s = {1 / most: Figure(True, 0.0)}, 1 / (most * SLOWEST)
    found = highest(figure, 1 / most, precision=_END, low=1 / most, high=most_s, known=known)
    return 1 / found.good if found.good and found.bad else 0.0


def _rates(
    case: LoadCase, seeds: int, precision: float, tell: Tell, changes: Changes, start: float | None = None
) -> Estimate | NoEdge:
    """One edge for each seed.

    Raises:
        ConfigError: the client holds requests back, so that no rate is too high for the server.
    """
    if case.held_back:
        key = "replay.max_in_flight" if case.config.replay.max_in_flight else "replay.mode"
        raise ConfigError(key, f"{case.held_back}, so the client sets the rate and none can be searched for")
    most, _ = case.most_rate
    start, edges = start or ((case.rate or 1.0) if most == inf else most / 2), []
    search = partial(_rate_edge, precision, changes)
    for seed, edge in enumerate(_of_seeds(case, seeds if case.draws else 1, search, start)):
        which = f" (seed {seed})" if case.draws else ""
        if edge.good is None:
            tried = tried_rates(case, changes, seed).values()
            short = [one for one in tried if not one.growth and not any(goal.upper for goal in one.broken)]
            last = max(short, key=lambda one: one.rate or 0.0, default=case.made[-1])
            met = "no rate that was tried meets it" if short else "no rate meets it"
            return NoEdge(f"{met}{which}. {_there(last)}", endless=False)
        if edge.bad is None:
            return NoEdge(f"{HIGHEST_RATE:g} requests/s still meet the SLO{which}", endless=True)
        edges.append(edge.good)
        tell(f"{edge.good:.4g} requests/s{which}, {len(tried_rates(case, changes, seed))} simulations")
    found = estimate(edges)
    # of the good side of each edge; the other may be higher by the precision of the search
    return found if found.high is None else replace(found, high=found.high * (1 + precision))


def _there(trial: Trial) -> str:
    return (f"At {trial.rate:.3g} requests/s " if trial.rate else "There ") + trial.why()


def _rate_edge(precision: float, changes: Changes, case: LoadCase, seed: int, start: float) -> Edge:
    """The search of one seed for the highest rate; that of the first is below those that no device of the kind serves.

    A goal of at least so much may fail where requests are few (a throughput) or many (a hit ratio), so the other goals
    are searched first.
    """
    figure, most = partial(_figure, case, changes, seed, ""), float(np.nextafter(case.most_rate[0], inf))
    never = {most: Figure(False, inf)} if most < HIGHEST_RATE and not seed else {}
    tried = tried_rates(case, changes, seed)
    low = min((case.rate or 1.0) * SLOWEST, start)
    # changes that meet the SLO at the start, just above the rate without them, often raise it by little more
    factor = 1 + precision if changes and start in tried else _FIRST_FACTOR
    limits = {"precision": precision, "low": low, "high": HIGHEST_RATE, "factor": factor}
    upper = tuple(goal for goal in case.slo if goal.upper)
    known = {rate: figure(rate, upper) for rate in tried}
    found = highest(partial(figure, goals=upper), start, known=known | never, **limits)
    if upper == case.slo or found.good is None or case.run(changes, rate=found.good, seed=seed).met:
        return found
    return highest(figure, found.good, known=never, **limits)


def _pool_edge(block_size: int, largest: int, case: LoadCase, seed: int, start: float) -> Edge:
    """The search of one seed for the smallest pool, in blocks."""

    def meets(blocks: int) -> bool:
        return case.run({"cache.pool_tokens": blocks * block_size}, seed=seed).met

    return Edge(smallest(meets, start=int(start), high=largest), None)


_Search = Callable[[LoadCase, int, float], Edge]


def _of_seeds(case: LoadCase, seeds: int, search: _Search, start: float) -> Iterator[Edge]:
    """The edges of the seeds, in order. The first seed starts at `start`, the others at its edge.

    The others are searched in `workers` processes (0: one a core, if the first took so long that it is worth them).
    The answers do not depend on their number. All trials are in `case.made`, in the order of the seeds.
    """
    begun = time.monotonic()
    first = search(case, 0, start)
    took = time.monotonic() - begun
    yield first
    asked, others = case.config.workers, range(1, seeds)
    wanted = asked or (os.cpu_count() or 1 if took > _WORTH_WORKERS_S else 1)
    workers = min(workers_that_fit(case.config, wanted), len(others))
    jobs = [(search, replace(case, made=[]), seed, first.good or start) for seed in others]
    for edge, made in in_workers(_searched, jobs, workers):
        case.made += made
        yield edge


def _searched(job: tuple[_Search, LoadCase, int, float]) -> tuple[Edge, list[Trial]]:
    search, case, seed, start = job
    return search(case, seed, start), case.made


# A pool search ends at so many times the larger of the configured pool and what the device's memory holds.
BEYOND = 8
_GIVEN = ("cache.pool_tokens", "cache.pool_blocks")


def device_blocks(config: RunConfig) -> int | None:
    """Blocks that the device's memory holds beside the weights; None where that is not known."""
    try:
        return deployment_of(replaced(config, dict.fromkeys(_GIVEN))).pool.num_blocks
    except ConfigError:
        return None


def smallest_pool(case: LoadCase, seeds: int, tell: Tell) -> CapacityAnswer:
    """The smallest pool, in whole blocks, that meets the SLO at the configured rate.

    It may be larger than the configured pool, and larger than the device's memory; the answer says so then.
    """
    each = " of each replica" if case.config.device.data_parallel > 1 else ""
    question, unit = f"smallest pool{each} that meets the SLO", "tokens"
    if reason := too_few(case):
        return CapacityAnswer(question, unit, None, reason)
    pool, held = deployment_of(case.config).pool, device_blocks(case.config)
    largest = BEYOND * max(pool.num_blocks, held or 0)
    found: list[float] = []
    search = partial(_pool_edge, pool.block_size, largest)
    for edge in _of_seeds(case, seeds if case.draws else 1, search, pool.num_blocks):
        if edge.good is None:
            tokens = largest * pool.block_size
            reason = f"not even {tokens:,} tokens meet the SLO, {BEYOND} times what is there. "
            return CapacityAnswer(question, unit, None, reason + _there(case.made[-1]))
        found.append(edge.good * pool.block_size)
        tell(f"{edge.good:,.0f} blocks of {pool.block_size}")
    holds = (held or inf) * pool.block_size
    beyond = f"more than the {holds:,} tokens that {case.config.device.name} holds"
    return CapacityAnswer(question, unit, estimate(found), beyond if max(found) > holds else "")


def best_block_size(
    case: LoadCase, sizes: Sequence[int], seeds: int, precision: float, tell: Tell
) -> CapacityAnswer:
    """The block size with the highest rate. `choices` has the rates of all sizes; their intervals may overlap.

    If a size meets the SLO at any rate, there is no best size.
    """
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise UserError("--block-sizes: at least two sizes to choose from, of 1 token or more")
    question = "block size with the highest rate that meets the SLO"
    if reason := too_few(case):
        return CapacityAnswer(question, "tokens", None, reason)
    found = dict[float, Estimate | NoEdge]()
    for size in sorted(set(sizes)):
        tell(f"blocks of {size}")
        found[size] = _rates(case, seeds, precision, tell, {"cache.block_size": size})
    failed = {size: edge for size, edge in found.items() if isinstance(edge, NoEdge)}
    rates = {size: edge for size, edge in found.items() if isinstance(edge, Estimate)}
    choices = tuple((size, rates.get(size)) for size in found)
    if not rates or any(edge.endless for edge in failed.values()):
        reason = "; ".join(f"blocks of {size}: {edge.reason}" for size, edge in failed.items())
        return CapacityAnswer(question, "tokens", None, reason, choices)
    best = max(rates, key=lambda size: (rates[size].mean, -size))
    return CapacityAnswer(question, "tokens", estimate([best]), _lead(rates, best, precision), choices)


def _lead(rates: Mapping[float, Estimate], best: float, precision: float) -> str:
    """A warning that the best size is not clearly better than some others, or an empty string."""
    top = rates[best]
    least = top.low if top.low is not None else top.mean / (1 + precision)
    alike = [size for size, rate in rates.items() if size != best and (rate.high or rate.mean) >= least]
    names = ", ".join(f"{size:g}" for size in sorted(alike))
    return f"not clearly better than {names}: the intervals overlap" if alike else ""


def curve(case: LoadCase, middle: float, seeds: int, points: int = 7) -> list[Trial]:
    """The trials made so far from half to one and a half of `middle`, and more between them, for the picture."""
    rates = [middle * (0.5 + place / (points - 1)) for place in range(points)]
    near = [one for one in case.made if rates[0] <= (one.rate or 0.0) <= rates[-1] and not one.end]
    few = range(min(seeds, 2) if case.draws else 1)
    return near + [case.run(rate=rate, seed=seed) for rate in rates for seed in few]
