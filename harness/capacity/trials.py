"""An SLO, and trials of candidates against it.

An SLO is a list of bounds on metrics. A trial simulates the configured point at another rate, pool size or block size,
under one seed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.config.errors import ConfigError, UserError
from harness.config.schema import Oversize, ReplayMode, RunConfig
from harness.metrics import METRICS
from harness.point.cost import cost_model
from harness.workload.simulate import simulate_metrics
from harness.workload.workload import NEVER_FITS, build_workload

_GOAL = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*")
DROPPED = "dropped"
"""Requests that were left out: by the trace reader, or longer than the model takes. They break no goal."""


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
LOST = {
    "rejected": "were rejected",
    "unfinished": "did not finish",
    NEVER_FITS: "never fit the pool and the limits of the scheduler",
}
"""Outcomes that break every SLO, in words."""


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
        goals.append(Goal(name, _number(number, part), sign.startswith("<")))
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
        self._config = with_drawn_arrivals(config)
        self._slo = slo
        self.made: list[Trial] = []

    def alike(self) -> "Trials":
        """Trials of the same point and SLO, none made yet."""
        return Trials(self._config, self._slo)

    @property
    def config(self) -> RunConfig:
        """The point that is varied."""
        return self._config

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
        config = _varied(self._config, seed, rate, pool_tokens, block_size)
        trial = self._simulated(config)
        self.made.append(trial)
        return trial

    def _simulated(self, config: RunConfig) -> Trial:
        try:
            workload = build_workload(config)
        except ConfigError as error:
            if error.key not in ("workload.oversize", "cache.pool_tokens"):
                raise
            return self._trial(config, {}, {NEVER_FITS: config.workload.num_requests or 1}, None)
        dropped = dict(workload.trace.header.dropped)
        outcome = {NEVER_FITS: dropped.pop(NEVER_FITS, 0), DROPPED: sum(dropped.values())}
        if outcome[NEVER_FITS]:
            return self._trial(config, {}, outcome, None)
        prediction = simulate_metrics(workload, cost_model(config), config.decoding.beam_churn)
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
            broken_goals(self._slo, metrics),
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
    elif (
        block_size is not None and cache.pool_blocks is not None
    ):  # blocks of another size, in the same memory
        cache = replace(cache, pool_tokens=cache.pool_blocks * cache.block_size, pool_blocks=None)
    if block_size is not None:
        cache = replace(cache, block_size=block_size)
    return replace(config, workload=workload, cache=cache)
