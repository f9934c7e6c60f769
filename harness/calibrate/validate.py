"""Held-out workloads: published lengths and arrivals that are not used for the fit.

They are measured, and predicted free-running. Every record that uses the calibration holds their errors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from engine.core.options import CachePolicy, Decoding, SchedulerLimits
from harness.calibrate.design import Budget
from harness.calibrate.pace import probe_s
from harness.config.schema import ReplayMode, RunConfig
from harness.measure.engine import measure
from harness.measure.yardstick import Reading
from harness.metrics import METRICS, compute_metrics
from harness.metrics.comparison import comparison_error
from harness.replay.cost_model import CostModel, PacedCost
from harness.replay.recorder import MeasuredRun
from harness.workload.decoding import RequestDecoding, TraceDecoding
from harness.workload.shapes import pool_shape
from harness.workload.simulate import simulate
from harness.workload.traffic import Traffic
from harness.workload.workload import Workload
from traces.reshape import scale_lengths, set_rate
from traces.synth.generator import generate_trace
from traces.trace import Trace

SEED = 104_729
METRICS_VALIDATED = ("output_throughput", "tpot_mean", "ttft_p50")
_POOL_TOKENS = 16_384
_VALIDATING = 0.75  # share of the budget after which no further workload is started
_MEAN_TOKENS = 160  # mean of a request after scaling, unless the model takes fewer


@dataclass(frozen=True)
class HeldOut:
    """A workload for validation. `load` is the requests that arrive in the time of a lone request."""

    name: str
    table: str
    requests: int
    load: float
    block_size: int = 16
    contiguous: bool = False
    beam_width: int = 1
    users: int = 0  # above 0: a closed loop


HELD_OUT = (
    HeldOut("Azure code, open loop", "azure_code", 20, 2.5),
    HeldOut("Azure conversation, 6 users", "azure_conv", 20, 1.0, block_size=8, users=6),
    HeldOut("Mooncake conversation, 3 beams", "mooncake_conversation", 12, 1.0, block_size=32, beam_width=3),
    HeldOut("arXiv summaries, contiguous", "arxiv", 12, 1.5, contiguous=True),
)


@dataclass(frozen=True)
class Validated:
    """A held-out workload with its measured runs and the pace of the device beside them."""

    held_out: HeldOut
    workload: Workload
    runs: Sequence[MeasuredRun]
    probe_s: float


def measure_held_out(
    config: RunConfig,
    lone_request_s: float,
    repeats: int,
    progress: Callable[[str], None],
    budget: Budget,
    reference: Reading | None,
) -> list[Validated]:
    """Run every held-out workload `repeats` times while the budget lasts, the first one always."""
    found: list[Validated] = []
    for held_out in HELD_OUT:
        if found and not budget.left(_VALIDATING):
            break
        progress(f"held out: {held_out.name}")
        workload = held_out_workload(config, held_out, lone_request_s)
        measure(
            config, workload, seed=SEED, reference=reference
        )  # libraries compile code for new shapes here
        probes, runs = [probe_s(config)], list[MeasuredRun]()
        for number in range(repeats):
            runs.append(measure(config, workload, seed=SEED + number, reference=reference))
            probes.append(probe_s(config))
        found.append(Validated(held_out, workload, runs, median(probes)))
    return found


def validation(
    measured: Sequence[Validated], cost: CostModel, calibrated_s: float
) -> dict[str, dict[str, dict[str, float]]]:
    """By workload and metric: the free-running error, and the spread of the repeats on the same scale.

    Predictions are scaled by the pace of the device beside the runs, as for a measured point.
    """
    return {
        entry.held_out.name: _errors(entry, PacedCost(cost, entry.probe_s / calibrated_s))
        for entry in measured
    }


def _errors(entry: Validated, cost: CostModel) -> dict[str, dict[str, float]]:
    predicted = compute_metrics(simulate(entry.workload, cost, None))
    runs = [compute_metrics(run.log) for run in entry.runs]
    found = {}
    for name in METRICS_VALIDATED:
        values = [run[name] for run in runs if name in run]
        error = comparison_error(METRICS[name], predicted.get(name), median(values)) if values else None
        if error is not None:
            found[name] = {"error": error}
            if len(values) > 1:
                found[name]["spread"] = (max(values) - min(values)) / median(values)
    return found


def held_out_workload(config: RunConfig, held_out: HeldOut, lone_request_s: float) -> Workload:
    """The workload on a pool of its own, its lengths cut to what the model takes."""
    base = pool_shape(config)
    size = 1 if held_out.contiguous else held_out.block_size
    longest = min(base.max_model_len, 1024)
    pool = replace(
        base,
        policy=CachePolicy.contiguous_max if held_out.contiguous else CachePolicy.paged,
        num_blocks=_POOL_TOKENS // size,
        block_size=size,
        max_model_len=longest,
        prefix_caching=not held_out.contiguous,
    )
    trace = _trace(held_out, longest, held_out.load / lone_request_s)
    budget = max(config.scheduler.max_batched_tokens, held_out.beam_width)
    limits = SchedulerLimits(budget, max_running=64, max_model_len=longest)
    decoding = Decoding.beam if held_out.beam_width > 1 else Decoding.greedy
    traffic = Traffic(ReplayMode.closed, users=held_out.users) if held_out.users else Traffic()
    return Workload(
        trace, pool, limits, TraceDecoding(RequestDecoding(held_out.beam_width, decoding)), traffic
    )


def _trace(held_out: HeldOut, longest: int, rate: float) -> Trace:
    trace = generate_trace(held_out.table, num_requests=held_out.requests, seed=SEED)
    totals = [row.prompt_tokens + row.output_tokens for row in trace.requests]
    mean = sum(totals) / len(totals)
    factor = min(_MEAN_TOKENS / mean, (longest - 4) / max(totals), 1.0)
    return set_rate(scale_lengths(trace, factor), rate)
