"""The record of a point: its results, and everything that is needed to trust or repeat it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.options import CachePolicy, Decoding
from harness.environment import engine_code, environment
from harness.metrics.analytic import CacheShape, Lengths, analytic_metrics
from harness.metrics.compute import compute_metrics, tenants_of_sides
from harness.metrics.log import RunLog
from harness.metrics.record import PointRecord, compare
from harness.point.error_levels import PricedRun, error_levels
from harness.replay.cost_model import CostModel
from harness.replay.folds import Prediction
from harness.workload.decoding import TABLE, parents_table
from harness.workload.deployment import Deployment
from harness.workload.point import Point
from traces.analysis.reuse import realised_prefix_share, tenants_of

if TYPE_CHECKING:
    from harness.replay.recorder import MeasuredRun


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
    simulated = replace(simulated, metrics=_asked(point, simulated.metrics))
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
        tenants=tenants_of_sides(logs, salts),
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
    return {
        name: value for name, value in figures.items() if point.pool.prefix_caching or name != "hit_ratio"
    }


def _pool_section(point: Point) -> dict[str, Any]:
    pool, groups = point.pool, None
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
    }


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
    words = (
        f"expanded: the engine keeps K and V of {expanded:,} bytes a token, where the pool counts latent vectors of "
        f"{pool.kv_bytes_per_token:,}; cache.groups=uniform keeps latent vectors"
    )
    return {"note": f"{pool.note}; {words}" if pool.note else words}


def _analytic(point: Point) -> dict[str, float]:
    workload, pool = point.workload, point.pool
    rows = workload.trace.columns
    if pool.groups is not None or workload.resubmits:
        return {}  # the closed forms are those of one block table, and of the requests of the trace
    lengths = Lengths(
        prompt_tokens=rows.prompt_tokens,
        output_tokens=rows.output_tokens,
        segments=rows.segments,
        tenants=tenants_of(workload.trace),
        width=workload.width,
        beam=workload.decoding is Decoding.beam,
    )
    contiguous = pool.policy is not CachePolicy.paged
    reserve = pool.max_model_len if contiguous else None
    uneven = contiguous and pool.policy is not CachePolicy.contiguous_max
    figures = analytic_metrics(lengths, CacheShape(pool.block_size, reserve, pool.prefix_caching, uneven))
    # others have widths of their own, drafts, or branches that end early
    plain = workload.trace_decoding.configured.speculation is None and workload.drawn.survival is None
    if plain and workload.is_uniform:
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
    return {
        f"kv_events_{name}.msgpack": log.kv_events for name, log in logs.items() if log.kv_events is not None
    }


def _stacked(parts: Sequence[tuple[str, int, Mapping[str, Any]]]) -> Table:
    rows = [len(next(iter(columns.values()))) for _, _, columns in parts]
    names = parts[0][2]
    table: Table = {name: np.concatenate([columns[name] for _, _, columns in parts]) for name in names}
    table["side"] = np.repeat(np.array([side for side, _, _ in parts], dtype=object), rows)
    table["run"] = np.repeat(np.array([number for _, number, _ in parts], dtype=np.int64), rows)
    return table
