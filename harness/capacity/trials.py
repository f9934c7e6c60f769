"""One simulation of a candidate: the configured point at another rate, pool or block size, under a seed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.capacity.slo import Slo, met
from harness.config.errors import ConfigError
from harness.config.schema import ReplayMode, RunConfig
from harness.point.cost import cost_model
from harness.point.simulate import simulate_metrics
from harness.point.workload import build_workload

DROPPED = "dropped"
"""Beside the outcomes: requests that never entered; the user or the reader left them out, so they break no goal."""


@dataclass(frozen=True)
class Trial:
    """What a candidate came to under one seed."""

    rate: float | None
    pool_tokens: int | None
    block_size: int
    seed: int
    metrics: Mapping[str, float]
    outcome: Mapping[str, int]
    extrapolated: Mapping[str, Any] | None
    met: bool


class Trials:
    """Simulates candidates and remembers every one; `slo` judges them."""

    def __init__(self, config: RunConfig, slo: Slo) -> None:
        self._config = drawn(config)
        self._slo = slo
        self.made: list[Trial] = []

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
        """Simulate one candidate; what is None stays as configured. A request that can never fit breaks the SLO."""
        config = _varied(self._config, seed, rate, pool_tokens, block_size)
        try:
            workload = build_workload(config)
        except ConfigError as error:
            if error.key != "workload.oversize":
                raise
            trial = self._trial(config, {}, {"rejected": 1}, None, fits=False)
        else:
            prediction = simulate_metrics(workload, cost_model(config), config.decoding.beam_churn)
            outcome = {**prediction.outcome, DROPPED: sum(workload.trace.header.dropped.values())}
            found = (prediction.metrics, outcome, prediction.extrapolated)
            trial = self._trial(config, *found, fits=True)
        self.made.append(trial)
        return trial

    def _trial(
        self,
        config: RunConfig,
        metrics: Mapping[str, float],
        outcome: Mapping[str, int],
        extrapolated: Mapping[str, Any] | None,
        *,
        fits: bool,
    ) -> Trial:
        lost = sum(count for name, count in outcome.items() if name not in ("finished", DROPPED))
        return Trial(
            config.workload.request_rate,
            config.cache.pool_tokens,
            config.cache.block_size,
            config.workload.seed,
            metrics,
            outcome,
            extrapolated,
            fits and not lost and met(self._slo, metrics),
        )


def drawn(config: RunConfig) -> RunConfig:
    """Recorded arrivals are one sample: a search draws them anew, as a Poisson process, unless told otherwise."""
    if config.replay.mode is ReplayMode.trace:
        config = replace(config, replay=replace(config.replay, mode=ReplayMode.poisson))
    return replace(config, measure=False)


def _varied(
    config: RunConfig, seed: int, rate: float | None, pool_tokens: int | None, block_size: int | None
) -> RunConfig:
    workload = replace(config.workload, seed=config.workload.seed + seed)
    cache = config.cache
    if rate is not None:
        workload = replace(workload, request_rate=rate)
    if pool_tokens is not None:
        cache = replace(cache, pool_tokens=pool_tokens)
    if block_size is not None:
        cache = replace(cache, block_size=block_size)
    return replace(config, workload=workload, cache=cache)
