"""A made-up store for tests of the report: plausible shapes, invented numbers, no replay behind them.

The figures come from the real metric code over invented run logs, so that they agree with each other.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.config.schema import RunConfig
from harness.metrics.analytic import CacheShape, Lengths, analytic_metrics
from harness.metrics.compute import compute_metrics
from harness.metrics.log import STEP_COLUMNS, RunLog
from harness.metrics.record import compare
from harness.store.manifest import Manifest, SweepPoint, write_manifest
from traces.trace import SegmentColumns

POOL, MAX_LEN, STEPS, REQUESTS = 6144, 1024, 150, 24
RUNS = 3
Axes = Mapping[str, Any]

FULL_GRID = {
    "cache.block_size": (8, 16, 32),
    "workload.prefix_share": (0.0, 0.5, 0.9),
    "decoding.beam_width": (1, 2, 4),
}


def grid(
    axes: Mapping[str, Iterable[Any]] = FULL_GRID, policies: Iterable[str] = ("paged", "contiguous_max")
) -> list[Axes]:
    """All combinations; a contiguous cache has one block size."""
    points = []
    for policy, values in itertools.product(policies, itertools.product(*axes.values())):
        point = {"cache.policy": policy, **dict(zip(axes, values, strict=True))}
        if policy != "paged":
            point["cache.block_size"] = 1
        if point not in points:
            points.append(point)
    return points


def write_store(
    root: Path, points: Iterable[Axes] | None = None, *, measure: bool = True, name: str = "synthetic"
) -> Path:
    """Write a store of these points (default: the full grid) and give its folder."""
    points = list(grid() if points is None else points)
    for number, point in enumerate(points):
        write_point(root, point, seed=number, measure=measure, name=name)
    asked = tuple(SweepPoint(_fingerprint(point), tuple(_overrides(point))) for point in points)
    manifest = Manifest(name, f"python -m harness sweep name={name}", (f"name={name}",), asked)
    write_manifest(root, manifest)
    return root


def write_point(
    root: Path, point: Axes, *, seed: int = 0, measure: bool = True, name: str = "synthetic", **changes: Any
) -> Path:
    """Write one point; `changes` replace sections of its record."""
    config = _config(point, name, measure)
    requests = _requests(point)
    logs = {("simulated", 0): _log(point, requests, seed, noise=0.0, bias=1.04)}
    if measure:
        logs |= {
            ("measured", run): _log(point, requests, seed + run, noise=0.03, bias=1.0) for run in range(RUNS)
        }
    record = _record(point, config, requests, logs, measure) | changes
    folder = root / "points" / record["fingerprint"]
    folder.mkdir(parents=True)
    _write_json(folder / "record.json", record)
    for table in ("steps", "requests"):
        frames = [
            pd.DataFrame(dict(getattr(log, table))).assign(side=side, run=run)
            for (side, run), log in logs.items()
        ]
        pd.concat(frames).to_parquet(folder / f"{table}.parquet", index=False)
    return folder


def write_failure(root: Path, point: Axes, message: str = "out of blocks") -> Path:
    """Write a point that failed."""
    fingerprint = _fingerprint(point)
    folder = root / "points" / fingerprint
    failure = {
        "schema": 1,
        "fingerprint": fingerprint,
        "overrides": _overrides(point),
        "error": message,
        "traceback": f"Traceback (most recent call last):\n  ...\nRuntimeError: {message}\n",
    }
    folder.mkdir(parents=True)
    _write_json(folder / "failure.json", failure)
    return folder


def _overrides(point: Axes) -> list[str]:
    return [f"{key}={value}" for key, value in point.items()]


def _fingerprint(point: Axes) -> str:
    return hashlib.blake2b(repr(sorted(point.items())).encode(), digest_size=8).hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def _config(point: Axes, name: str, measure: bool) -> dict[str, Any]:
    config = json.loads(json.dumps(dataclasses.asdict(RunConfig(name=name, measure=measure))))
    for key, value in point.items():
        group, leaf = key.split(".")
        config[group][leaf] = value
    return config  # type: ignore[no-any-return]


def _requests(point: Axes) -> Lengths:
    draw = np.random.default_rng(7)
    prompt = draw.integers(60, 500, REQUESTS)
    shared = (prompt * point.get("workload.prefix_share", 0.0)).astype(int)
    segments = SegmentColumns.of(
        [
            [(int(i) % 4, int(s)), (None, int(p - s))]
            for i, (s, p) in enumerate(zip(shared, prompt, strict=True))
        ]
    )
    width = point.get("decoding.beam_width", 1)
    return Lengths(prompt, draw.integers(20, 120, REQUESTS), segments=segments, width=width, beam=width > 1)


def _log(point: Axes, lengths: Lengths, seed: int, *, noise: float, bias: float) -> RunLog:
    paged, block = point["cache.policy"] == "paged", point.get("cache.block_size", 16)
    width, share = point.get("decoding.beam_width", 1), point.get("workload.prefix_share", 0.0)
    draw = np.random.default_rng(seed)
    phase = np.arange(STEPS) / STEPS
    running = np.maximum(1, np.round((16 if paged else 9) * np.sin(np.pi * phase) ** 0.7 / width)).astype(int)
    rows = running * width
    own = 180 * (1 - 0.6 * share if paged else 1)
    token = (running * own + rows * 60 * phase).astype(int)
    internal = (rows * (block - 1) * 0.35 if paged else rows * (MAX_LEN * 0.4 - 200)).astype(int)
    reserved = (rows * (block - 1) * 0.15 + 20 * running if paged else rows * 200).astype(int)
    cached = (2000 * share * phase).astype(int) if paged else np.zeros(STEPS, dtype=int)
    over = np.maximum(0, token + internal + reserved + cached - POOL)
    internal = internal - np.minimum(internal, over)
    used = token + internal + reserved + cached
    external = np.zeros(STEPS, dtype=int) if paged else (POOL - used) // 3
    prefill = np.where(np.arange(STEPS) % 5 == 0, 64, 0)
    kv_read = rows * (180 + 60 * phase)
    attention = (2e-4 + 3e-7 * kv_read * (1 + 1.5 / block)) * bias
    seconds = (2e-3 + 1e-4 * rows + 2e-5 * prefill) * bias + attention
    seconds = seconds * (1 + noise * draw.standard_normal(STEPS) + (0.02 if noise else 0))
    start = np.concatenate([[0.0], np.cumsum(seconds)[:-1]]) + np.where(
        np.arange(STEPS) > STEPS * 0.6, 0.05, 0.0
    )
    steps = {name: np.zeros(STEPS) for name in STEP_COLUMNS} | {
        "step": np.arange(STEPS), "start_s": start, "seconds": seconds, "attention_s": attention, "rows": rows,
        "decode_rows": rows, "prefill_tokens": prefill, "query_tokens": rows + prefill, "kv_read_tokens": kv_read,
        "running": running, "waiting": np.where(prefill > 0, 2, 0), "token": token, "cached": cached,
        "reserved": reserved, "internal": internal, "external": external, "free": POOL - used - external,
        "logical_blocks": (token + internal) // block + running * 8 * (width - 1) + (running * 12 * share).astype(int),
        "physical_blocks": (token + internal) // block, "new_blocks": rows // block + 1,
        "copies": np.where(paged, width - 1, 0) * np.ones(STEPS),
    }  # fmt: skip
    return _with_requests(steps, lengths, block, width, share if paged else 0.0)


def _with_requests(steps: dict[str, Any], lengths: Lengths, block: int, width: int, share: float) -> RunLog:
    ends = steps["start_s"] + steps["seconds"]
    first = np.linspace(1, STEPS * 0.6, REQUESTS).astype(int)
    last = np.minimum(first + lengths.output_tokens // 2, STEPS - 1)
    arrival = np.maximum(0.0, steps["start_s"][first] - 0.02)
    requests = {
        "request_id": np.arange(REQUESTS), "arrival_s": arrival, "first_scheduled_s": steps["start_s"][first],
        "first_token_s": ends[first], "finish_s": ends[last], "prompt_tokens": lengths.prompt_tokens,
        "output_tokens": lengths.output_tokens, "width": np.full(REQUESTS, width),
        "hit_tokens": (lengths.prompt_tokens * share * 0.8).astype(int) // block * block,
        "resumed_hit_tokens": np.zeros(REQUESTS), "recomputed_tokens": np.zeros(REQUESTS),
        "preemptions": np.zeros(REQUESTS), "outcome": np.zeros(REQUESTS),
    }  # fmt: skip
    gaps = steps["seconds"]
    return RunLog(steps, requests, gaps, np.full(len(gaps), 3.0), block, POOL, 2048, float(ends[-1]))


def _record(
    point: Axes,
    config: dict[str, Any],
    lengths: Lengths,
    logs: Mapping[tuple[str, int], RunLog],
    measure: bool,
) -> dict[str, Any]:
    paged = point["cache.policy"] == "paged"
    block = point.get("cache.block_size", 16)
    analytic = analytic_metrics(lengths, CacheShape(block, None if paged else MAX_LEN))
    simulated = compute_metrics(logs["simulated", 0])
    runs = [compute_metrics(log) for (side, _), log in logs.items() if side == "measured"]
    rows = compare(analytic, simulated, runs)
    finished = {"finished": REQUESTS, "rejected": 0, "unfinished": 0}
    errors = {row["metric"]: row["error"] for row in rows if row["error"] is not None}
    kernel = 1e-4 * (1 + 1.5 / block)
    return {
        "schema": 1, "fingerprint": _fingerprint(point), "name": config["name"], "overrides": _overrides(point),
        "config": config,
        "trace": {
            "name": "azure_conv", "format": "generated", "source": "embedded generator", "sha256": "0" * 64,
            "digest": "1" * 64, "key_kind": "content", "clock_quantum_us": 1, "rows_read": REQUESTS,
            "rows_kept": REQUESTS, "dropped": {}, "noted": {},
            "changes": [f"{point.get('workload.prefix_share', 0.0):.0%} of the prompt tokens are shared."],
            "calibration": {"ks_prompt": 0.01}, "requests": REQUESTS,
            "prompt_tokens": int(lengths.prompt_tokens.sum()), "output_tokens": int(lengths.output_tokens.sum()),
            "realised_prefix_share": point.get("workload.prefix_share", 0.0),
        },
        "pool": {
            "policy": point["cache.policy"], "num_blocks": POOL // block, "block_size": block, "tokens": POOL,
            "bytes": POOL * 2048, "kv_bytes_per_token": 2048, "max_model_len": MAX_LEN,
        },
        "environment": {
            "python": "3.11.2", "torch": "2.13.0", "transformers": "5.17.0", "triton": None, "numpy": "2.3.1",
            "cpu": "Synthetic CPU", "cores": 2, "gpu": None, "load_average": 0.5, "code": "abc123", "clock": "cpu",
        },
        "cost": {
            "kind": "fitted", "name": "synthetic", "fingerprint": "feed",
            "heldout": {
                "step": {"n": 120, "mape": 0.04, "bias": -0.01, "p95": 0.11, "max": 0.3},
                "attention": {"n": 120, "mape": 0.06, "bias": 0.0, "p95": 0.15, "max": 0.4},
            },
            "provenance": {"device": "Synthetic CPU", "date": "2026-01-01"},
        },
        "outcome": {"simulated": finished, "measured": finished if measure else None, "dropped": 0},
        "analytic": analytic, "simulated": simulated, "comparison": rows,
        "measured": {"runs": runs, "median": {}, "spread": {}} if measure else None,
        "levels": {
            "counts": {"identical": True, "steps": STEPS, "first_difference": None},
            "kernel": {"n": 40, "mape": 0.05, "bias": 0.01, "measured_mean_s": kernel,
                       "predicted_mean_s": kernel * 1.05},
            "teacher_forced": {"n": STEPS, "mape": 0.04 + 0.001 * block, "bias": 0.02, "total_error": 0.03},
            "free_running": errors,
        } if measure else None,
        "audit": {"checks": 10, "mismatches": 0} if measure else None,
        "seconds": {"simulated": 0.1, "measured": 1.0},
    }  # fmt: skip
