"""Calibration: run the plan's workloads on the engine, fit the cost model, and test it on the held-out ones."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.core.limits import SchedulerLimits
from engine.core.request import Decoding
from harness.config.schema import CachePolicy, RunConfig
from harness.environment import device_identity
from harness.measured.calibration import calibration_fingerprint, save_calibration
from harness.measured.engine import MeasuredRun, measure
from harness.measured.plan import CASES, CalibrationCase, case_trace
from harness.point.clock import clock_of
from harness.point.shapes import PoolShape, pool_shape
from harness.point.workload import Workload
from harness.sim.cost import CostSource
from harness.sim.features import FloatArray
from harness.sim.fitted import FittedCost, fit_cost, held_out_error
from harness.sim.genealogy import churn_of_run

_SEED = 7_919
_POOL_TOKENS = 16_384

CaseProgress = Callable[[str, int, int], None]


def calibrate(config: RunConfig, progress: CaseProgress | None = None) -> FittedCost:
    """Measure, fit, validate and store; takes some tens of seconds. Progress gets (case, done, cases)."""
    started, load = time.time(), os.getloadavg()[0]
    lone = _lone_request_s(config)
    runs: list[tuple[CalibrationCase, MeasuredRun]] = []
    for number, case in enumerate(CASES):
        if progress:
            progress(case.name, number, len(CASES))
        runs.append((case, measure(config, _workload(config, case, lone), seed=_SEED)))
    cost = _fit(config, runs, {"started": started, "load_average": (load, os.getloadavg()[0])})
    save_calibration(config, cost)
    return cost


def _lone_request_s(config: RunConfig) -> float:
    """How long one request takes alone: the unit of the plan's loads. The first run also warms the engine up."""
    case = CalibrationCase("alone", 2, (64, 64), (16, 16), 0)
    for _ in range(2):
        run = measure(config, _workload(config, case, 1.0), seed=_SEED)
    return run.log.span_s / case.requests


def _workload(config: RunConfig, case: CalibrationCase, lone_request_s: float) -> Workload:
    base = pool_shape(config)
    longest = min(base.max_model_len, 1024)
    size = 1 if case.contiguous else case.block_size
    pool = replace(
        base,
        policy=CachePolicy.contiguous_max if case.contiguous else CachePolicy.paged,
        num_blocks=_POOL_TOKENS // size,
        block_size=size,
        max_model_len=longest,
        prefix_caching=not case.contiguous,
    )
    width = max(case.beam_width, case.samples)
    decoding = Decoding.BEAM if case.beam_width > 1 else Decoding.SAMPLE if width > 1 else Decoding.GREEDY
    limits = SchedulerLimits(config.scheduler.max_batched_tokens, max_running=64, max_model_len=longest)
    trace = case_trace(case, seed=_SEED, lone_request_s=lone_request_s, longest=_usable(pool, longest))
    return Workload(trace, pool, limits, decoding, width)


def _usable(pool: PoolShape, longest: int) -> int:
    return min(longest, pool.tokens // 8)


def _fit(
    config: RunConfig, runs: list[tuple[CalibrationCase, MeasuredRun]], provenance: dict[str, object]
) -> FittedCost:
    seen = [run for case, run in runs if not case.held_out]
    unseen = [run for case, run in runs if case.held_out]
    blank = CostSource("fitted", config.model.name, calibration_fingerprint(config))
    cost = fit_cost(*_columns(seen), blank)
    features, seconds, attention = _columns(unseen)
    price = cost.price(features)
    heldout = {
        "step": held_out_error(price.seconds, seconds),
        "attention": held_out_error(price.attention_s, attention),
    }
    facts = {
        "what": "non-negative least squares on measured steps",
        "device": device_identity(config.engine.device),
        "clock": str(clock_of(config)),
        "steps_fitted": len(_columns(seen)[1]),
        "steps_held_out": len(seconds),
        "cases": [case.name for case, _ in runs],
        **provenance,
    }
    source = replace(blank, provenance=facts, heldout=heldout, beam_churn=_churn(runs))
    return replace(cost, source=source)


def _columns(runs: list[MeasuredRun]) -> tuple[FloatArray, FloatArray, FloatArray]:
    features = np.concatenate([run.recorder.features for run in runs])
    seconds = np.concatenate([run.log.steps["seconds"] for run in runs])
    return features, seconds, np.concatenate([run.log.steps["attention_s"] for run in runs])


def _churn(runs: list[tuple[CalibrationCase, MeasuredRun]]) -> dict[int, float]:
    """Re-parenting by beam width, over all selections but a request's first."""
    distinct: dict[int, list[int]] = {}
    for case, run in runs:
        if case.beam_width == 1:
            continue
        begun: set[int] = set()
        for parents in run.recorder.parents:
            for request_id, chosen in parents.items():
                if request_id in begun:
                    distinct.setdefault(case.beam_width, []).append(len(set(chosen)))
                begun.add(request_id)
    return {width: churn_of_run(width, counts) for width, counts in sorted(distinct.items())}
