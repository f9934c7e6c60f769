"""The record of a point: its results, the errors of its prediction by level, and what is needed to repeat it.

The levels are: counts, kernel, teacher-forced steps, free run. The attribution splits the free-running error into the
price of attention, the price of the rest of a step, and different schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.options import CachePolicy, Decoding
from harness.cost.fitted import held_out_error
from harness.environment import engine_code, environment
from harness.metrics import METRICS
from harness.metrics.analytic import CacheShape, Lengths, analytic_metrics
from harness.metrics.compute import compute_metrics, tenants_of_sides
from harness.metrics.log import FloatArray, RunLog
from harness.metrics.record import RULES, PointRecord, compare, comparison_error
from harness.replay.arrivals import to_ns, to_s
from harness.replay.cost_model import CostModel, price_table
from harness.replay.executors import RecordingEndedError
from harness.replay.features import FEATURES
from harness.replay.folds import Prediction
from harness.replay.recorder import MeasuredRun, digests_differ, waste_differs
from harness.workload.decoding import TABLE, parents_table
from harness.workload.deployment import Deployment
from harness.workload.point import Point
from harness.workload.simulate import replay_recording
from traces.analysis.reuse import realised_prefix_share

if TYPE_CHECKING:
    from harness.replay.recorder import MeasuredRun

ATTRIBUTED = ("step_mean", "output_throughput", "tpot_mean", "e2e_mean", "ttft_p50", "queue_mean")
LEVELS = ("kernel", "rest_of_step", "divergence")
_COMPOSITION = ("rows", "decode_rows", "query_tokens", "admitted", "preempted")


@dataclass(frozen=True)
class PricedRun:
    """A measured run, and what a cost model says that its step plans take, in s `[steps]`."""

    run: MeasuredRun
    seconds: FloatArray
    attention_s: FloatArray


def priced(runs: Sequence[MeasuredRun], cost: CostModel) -> list[PricedRun]:
    """The runs with the prices of their plans."""
    return [PricedRun(run, *price_table(cost, run.recording.features)) for run in runs]


def error_levels(point: Point, told: Sequence[PricedRun], simulated: RunLog) -> dict[str, Any]:
    """The section `levels` of a record, from all measured runs, but for the errors of the free run."""
    runs = [one.run for one in told]
    attention = np.concatenate([run.log.steps["attention_s"] for run in runs])
    predicted = np.concatenate([one.attention_s for one in told])
    ran = attention > 0  # a step in which all were preempted has none
    return {
        "kernel": {
            **held_out_error(predicted[ran], attention[ran]),
            "measured_mean_s": float(attention.mean()),
            "predicted_mean_s": float(predicted.mean()),
        },
        "teacher_forced": teacher_forced(told),
        "spread": _spread(told),
        "attribution": attribution(told, compute_metrics(simulated)),
        "suspect": suspect(told),
        "divergence": divergence(runs[0].log, simulated),
        "counts": _counts(point, runs),
    }


def _spread(told: Sequence[PricedRun]) -> dict[str, float | None]:
    """The range of the single runs' total errors, for attention and for whole steps; None for a single run."""
    if len(told) < 2:
        return {"kernel": None, "teacher_forced": None}
    steps = [(one, one.run.log.steps) for one in told]
    totals = {
        "kernel": [float(one.attention_s.sum() / known["attention_s"].sum() - 1) for one, known in steps],
        "teacher_forced": [float(one.seconds.sum() / known["seconds"].sum() - 1) for one, known in steps],
    }
    return {level: max(errors) - min(errors) for level, errors in totals.items()}


def teacher_forced(told: Sequence[PricedRun], *, clocked: bool = False) -> dict[str, float]:
    """Errors of the cost model on the step plans of the measured runs; with `clocked` against the times of the clock,
    not divided by the pace.
    """
    seconds = [one.run.clocked_s if clocked else one.run.log.steps["seconds"] for one in told]
    return held_out_error(np.concatenate([one.seconds for one in told]), np.concatenate(seconds))


def _counts(point: Point, runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Replay each run's measured durations on the simulated side. Every step plan must equal the run's own plan.

    With groups of layers, the bytes of the pools by cause must be equal too, in every step.
    """
    steps = 0
    for number, run in enumerate(runs):
        measured = run.recording.digests
        steps += len(measured)
        try:
            log, recorder = replay_recording(point, run.recording)
            first = digests_differ(recorder.digests, measured)
            first = waste_differs(log, run.log) if first is None else first
        except RecordingEndedError:
            first = len(measured)
        if first is not None:
            chance = f": {run.alike} of the prompts begin by chance with ids of others, whose blocks the engine hits"
            where = f"run {number}, step {first}" + (chance if run.alike else "")
            return {"identical": False, "steps": steps, "first_difference": where}
    return {"identical": True, "steps": steps, "first_difference": None}


def attribution(told: Sequence[PricedRun], simulated: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By metric: the error of each level, its spread over the runs and its share; errors as in the comparison."""
    by_run = [_metrics_by_level(one) for one in told]
    found = {name: _parts(name, by_run, simulated) for name in ATTRIBUTED}
    return {name: parts for name, parts in found.items() if parts}


def _metrics_by_level(told: PricedRun) -> tuple[dict[str, float], ...]:
    """The run's metrics three times: as measured, with predicted attention, and with predicted steps."""
    log = told.run.log
    with_attention = log.steps["seconds"] - log.steps["attention_s"] + told.attention_s
    logs = (log, with_step_times(log, with_attention), with_step_times(log, told.seconds))
    return tuple(compute_metrics(one) for one in logs)


def with_step_times(log: RunLog, seconds: FloatArray) -> RunLog:
    """The run with other step times and the same step plans.

    A step starts when the last one ends. A step that waited for a request starts no earlier than it did. Arrivals stay
    unchanged. Inter-token gaps are not computed again.
    """
    starts = to_ns(log.steps["start_s"])
    ends = starts + to_ns(log.steps["seconds"])
    fresh = np.maximum(1, to_ns(np.asarray(seconds, dtype=np.float64)))
    begun, clock = np.empty_like(starts), 0
    for step, (start, took) in enumerate(zip(starts.tolist(), fresh.tolist(), strict=True)):
        waited = step == 0 or start > ends[step - 1]  # idle until a request arrived
        clock = max(clock, start) if waited else clock
        begun[step] = clock
        clock += took
    before = np.concatenate([starts, ends])
    after = np.concatenate([begun, begun + fresh])
    order = np.argsort(before, kind="stable")

    def moved(times: FloatArray) -> FloatArray:
        known = np.isfinite(times)
        place = np.searchsorted(before[order], to_ns(np.where(known, times, 0.0)))
        return np.where(known, to_s(after[order][np.minimum(place, len(order) - 1)]), np.nan)

    times = {name: moved(log.requests[name]) for name in ("first_scheduled_s", "first_token_s", "finish_s")}
    steps = {**log.steps, "start_s": to_s(begun), "seconds": to_s(fresh)}
    end = float(to_s(begun[-1] + fresh[-1])) if len(fresh) else 0.0
    return replace(log, steps=steps, requests={**log.requests, **times}, span_s=end)


def _parts(
    name: str, by_run: Sequence[Sequence[Mapping[str, float]]], simulated: Mapping[str, float]
) -> dict[str, Any] | None:
    """One metric's error by level, its largest deviation over the runs, and its share of the sum of all levels."""
    runs = []
    for measured, *sides in by_run:
        compared = (side.get(name) for side in (*sides, simulated))
        errors = [comparison_error(METRICS[name], side, measured.get(name)) for side in compared]
        known = [error for error in errors if error is not None]
        if len(known) == len(errors):
            kernel, step, free = known
            runs.append(dict(zip(LEVELS, (kernel, step - kernel, free - step), strict=True)))
    if not runs:
        return None
    middle = {level: median(run[level] for run in runs) for level in LEVELS}
    size = sum(abs(part) for part in middle.values())
    return {
        "error": middle,
        "spread": {
            level: max(abs(run[level] - middle[level]) for run in runs) if len(runs) > 1 else None
            for level in LEVELS
        },
        "share": {level: abs(part) / size if size else 0.0 for level, part in middle.items()},
        "total": median(sum(run.values()) for run in runs),
    }


def divergence(run: RunLog, simulated: RunLog) -> dict[str, Any]:
    """Where the simulated schedule differs from the measured one: the first step with another composition, and when."""
    steps = min(len(run.steps["step"]), len(simulated.steps["step"]))
    same = np.ones(steps, dtype=bool)
    for name in _COMPOSITION:
        same &= run.steps[name][:steps] == simulated.steps[name][:steps]
    if same.all() and len(run.steps["step"]) == len(simulated.steps["step"]):
        return {"first_step": None, "equal_steps": 1.0, "shift_s": None}
    first = int(np.argmin(same)) if not same.all() else steps
    at = min(first, steps - 1)
    return {
        "first_step": first,
        "equal_steps": float(same.sum() / max(len(run.steps["step"]), len(simulated.steps["step"]))),
        "shift_s": float(simulated.steps["start_s"][at] - run.steps["start_s"][at]),
    }


def suspect(told: Sequence[PricedRun]) -> dict[str, Any]:
    """The feature that explains most of the residuals of the step prices: a hint at a missing term of the model.

    `explained` is the share of the residuals' variance that a straight line over the feature explains.
    """
    features = np.concatenate([one.run.recording.features for one in told])
    residual = np.concatenate([one.run.log.steps["seconds"] - one.seconds for one in told])
    spread = residual - residual.mean()
    total = float(spread @ spread)
    explained = {}
    for name, column in zip(FEATURES, features.T, strict=True):
        centred = column - column.mean()
        power = float(centred @ centred)
        if power > 0 and total > 0:
            explained[name] = float(centred @ spread) ** 2 / (power * total)
    if not explained:
        return {"feature": None, "explained": 0.0}
    name = max(explained, key=lambda key: explained[key])
    return {"feature": name, "explained": explained[name]}


_OF_PROMPTS = ("finished", "hit_tokens", "hit_ratio")  # known whatever is generated
Table = dict[str, np.ndarray[Any, np.dtype[Any]]]


def make_record(
    point: Point,
    cost: CostModel,
    simulated: Prediction,
    told: Sequence[PricedRun],
    *,
    bounds: Mapping[str, Any] | None,
    oracle: Mapping[str, Any] | None,
    pace: Mapping[str, Any] | None,
    seconds: Mapping[str, float],
) -> PointRecord:
    """The record of a point, without what says which point of a sweep it is; `told` has the measured runs."""
    deployment, trace, analytic = point.deployment, point.trace, _asked(point, _analytic(point))
    runs = [one.run for one in told]
    measured = [_asked(point, compute_metrics(run.log)) for run in runs]
    pool = _pool_section(point) | (_engine_note(deployment) if runs else {})
    logs = {"simulated": simulated.log} | ({"measured": runs[0].log} if runs else {})
    levels = error_levels(point, told, simulated.log) if runs else {}
    comparison = compare(analytic, simulated.metrics, measured)
    if levels:
        errors = {row["metric"]: row["error"] for row in comparison if row["error"] is not None}
        levels["free_running"] = errors
    salts = dict(zip(trace.columns.request_id.tolist(), trace.columns.values("salt"), strict=True))
    return PointRecord(
        name=point.name,
        trace={
            **asdict(trace.header),
            "digest": trace.digest,
            "requests": len(trace.requests),
            "prompt_tokens": int(trace.columns.prompt_tokens.sum()),
            "output_tokens": int(trace.columns.output_tokens.sum()),
            "realised_prefix_share": realised_prefix_share(trace),
        },
        pool=pool,
        environment=environment(deployment.device_at_hand, str(deployment.clock_used))
        | ({"engine_kernels": engine_code(deployment.engine, deployment.vllm_python)} if runs else {}),
        cost={**asdict(cost.source), "extrapolated": simulated.extrapolated},
        outcome={
            "simulated": dict(simulated.outcome),
            "measured": min(
                (run.log.outcomes for run in runs), key=lambda counts: counts["finished"], default=None
            ),
            "dropped": sum(trace.header.dropped.values()),
        },
        analytic=analytic,
        simulated=simulated.metrics,
        tenants=tenants_of_sides(logs, salts, point.pool.whole_tokens, cached=point.pool.prefix_caching),
        measured={
            "runs": [dict(run) for run in measured],
            "median": {row["metric"]: row["measured"] for row in comparison if row["measured"] is not None},
            "spread": {row["metric"]: row["spread"] for row in comparison if row["spread"] is not None},
        }
        if runs
        else {},
        comparison=comparison,
        levels=levels,
        # Not counted here: an audit that finds a mismatch raises AuditError, and the point fails instead of recording.
        audit={"checks": sum(run.audits for run in runs), "mismatches": 0} if runs else {},
        seconds=seconds,
        bounds=bounds or {},
        oracle=oracle or {},
        pace=pace or {},
    )


def _asked(point: Point, figures: dict[str, float]) -> dict[str, float]:
    """The figures without the ratio of hits where there is no prefix cache to ask: what is not measured is not 0 %."""
    return {name: one for name, one in figures.items() if point.pool.prefix_caching or name != "hit_ratio"}


def _pool_section(point: Point) -> dict[str, Any]:
    pool, cache, groups = point.pool, point.deployment.cache, None
    rules = {key: found for key, known in RULES.items() if (found := known.get(getattr(cache, key)))}
    if pool.groups is not None:
        # blocks are the pages of all pools, the block size is the match unit, and tokens are slots of `slot_bytes`
        groups = {
            "pages": str(pool.groups.pages),
            "match_unit": pool.groups.match_unit,
            "slot_bytes": pool.slot_bytes,
            "page_counts": list(pool.page_counts),
            "layers": [asdict(group) for group in pool.groups.groups],
        }
    return {
        "policy": str(pool.policy),
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "tokens": pool.tokens,
        "bytes": pool.tokens * pool.slot_bytes,
        "kv_bytes_per_token": pool.kv_bytes_per_token,
        "max_model_len": pool.max_model_len,
        "replicas": point.replicas,
        "sized_by": pool.sized_by,
        "note": pool.note,
        "memory_per_device": asdict(pool.memory) if pool.memory else None,
        "groups": groups,
    } | ({"rules": rules} if rules else {})


def _engine_note(deployment: Deployment) -> dict[str, str]:
    """A note beside the pool of a measured point whose engine keeps more than the pool counts; empty for others.

    transformers hands expanded K and V of latent layers to its attention. The engine keeps these unless layers are in
    groups, and the pool's bytes are those of latent vectors on both sides.
    """
    shape, pool = deployment.shape, deployment.pool
    if shape.latent is None or pool.groups is not None:
        return {}
    width = shape.heads * (shape.head_dim + shape.latent.rope_dim + shape.latent.value_dim)
    expanded = shape.layers * width * shape.bytes_per_element
    counted = f"where the pool counts latent vectors of {pool.kv_bytes_per_token:,}"
    words = f"expanded: the engine keeps K and V of {expanded:,} bytes a token, {counted}"
    words += "; cache.groups=uniform keeps latent vectors"
    return {"note": f"{pool.note}; {words}" if pool.note else words}


def _analytic(point: Point) -> dict[str, float]:
    workload, pool, rows = point.workload, point.pool, point.trace.columns
    if pool.groups is not None or workload.resubmits:
        return {}  # the closed forms are those of one block table, and of the requests of the trace
    lengths = Lengths(
        prompt_tokens=rows.prompt_tokens,
        output_tokens=rows.output_tokens,
        segments=rows.segments,
        tenants=workload.trace.tenants,
        width=workload.width,
        beam=workload.decoding is Decoding.beam,
    )
    contiguous = pool.policy is not CachePolicy.paged
    reserve = pool.max_model_len if contiguous else None
    uneven = contiguous and pool.policy is not CachePolicy.contiguous_max
    figures = analytic_metrics(lengths, CacheShape(pool.block_size, reserve, pool.prefix_caching, uneven))
    # others have widths of their own, drafts, branches that end early or share no block
    plain = workload.trace_decoding.configured.speculation is None and workload.drawn.survival is None
    plain &= workload.width == 1 or not point.deployment.cache.copy_at_fork
    if plain and workload.decodings <= {workload.trace_decoding.configured}:
        return figures
    return {name: figures[name] for name in _OF_PROMPTS if name in figures}


def tables_of(simulated: RunLog, runs: "Sequence[MeasuredRun]") -> dict[str, Table]:
    """Steps and requests of both sides, with the columns `side` and `run`, and parents of measured beams, if any."""
    logs = [("simulated", 0, simulated), *(("measured", number, run.log) for number, run in enumerate(runs))]
    tables = {
        name: _stacked([(side, number, getattr(log, name)) for side, number, log in logs])
        for name in ("steps", "requests")
    }
    for name in ("lookups", "residency", "waste"):
        kept = [(side, number, getattr(log, name)) for side, number, log in logs]
        if found := [part for part in kept if part[2] is not None]:
            tables[name] = _stacked(found)
    parents = parents_table([run.recording.parents for run in runs])
    return {**tables, TABLE: parents} if parents else tables


def files_of(simulated: RunLog, runs: "Sequence[MeasuredRun]") -> dict[str, bytes]:
    """Files that a point keeps beside its tables, by name: the KV events of each run where they were kept."""
    logs = {"simulated": simulated, **{f"measured_{number}": run.log for number, run in enumerate(runs)}}
    return {f"kv_events_{of}.msgpack": it.kv_events for of, it in logs.items() if it.kv_events is not None}


def _stacked(parts: Sequence[tuple[str, int, Mapping[str, Any]]]) -> Table:
    rows = [len(next(iter(columns.values()))) for _, _, columns in parts]
    names = parts[0][2]
    table: Table = {name: np.concatenate([columns[name] for _, _, columns in parts]) for name in names}
    table["side"] = np.repeat(np.array([side for side, _, _ in parts], dtype=object), rows)
    table["run"] = np.repeat(np.array([number for _, number, _ in parts], dtype=np.int64), rows)
    return table
