"""From a run log to metrics. `harness.metrics.definitions` has the definitions in words and the units."""

from collections.abc import Iterator, Mapping

import numpy as np

from harness.metrics.definitions import QUANTILES
from harness.metrics.log import SLOT_STATES, WASTE_COLUMNS, Column, FloatArray, RunLog
from harness.metrics.totals import Samples, Totals, as_floats, exact_samples, request_totals, step_totals

NamedValues = Iterator[tuple[str, float]]


def compute_metrics(log: RunLog) -> dict[str, float]:
    """Every metric of `METRICS` that is defined for this run, by name, in the metric's unit.

    Latencies cover finished requests. A metric without a single sample (an empty log, a TPOT where all
    outputs are one token) is absent; no value is NaN or infinite.
    """
    requests = as_floats(log.requests)
    totals = step_totals(as_floats(log.steps)) | request_totals(requests)
    samples = exact_samples(requests, log.itl_s, log.itl_weight)
    sizes = (log.span_s, log.capacity_slots, log.kv_bytes_per_token)
    found = metrics_of_totals(totals, samples, *sizes, replicas=log.replicas)
    if log.optimal_hit_tokens is not None:
        found["optimal_hit_tokens"] = log.optimal_hit_tokens
        found |= dict(_ratio("optimal_hit_ratio", log.optimal_hit_tokens, totals["prompt_scheduled"]))
    return found if log.waste is None else found | _waste(log.waste, log.steps["seconds"])


def metrics_of_totals(
    totals: Totals,
    samples: Mapping[str, Samples],
    span_s: float,
    capacity_slots: int,
    kv_bytes_per_token: int,
    *,
    replicas: int = 1,
) -> dict[str, float]:
    """The metrics of a run from its sums and distributions; `capacity_slots` is the pool of a replica in KV slots."""
    found = {
        **dict(_latencies(samples)),
        **dict(_throughput(totals, span_s)),
        **dict(_slots(totals, capacity_slots, kv_bytes_per_token)),
        **dict(_cache(totals)),
        "finished": totals["finished"],
        **dict(_counts(totals)),
        **dict(_times(totals, span_s * replicas)),
    }
    return {name: value for name, value in found.items() if np.isfinite(value)}


def _waste(waste: Mapping[str, Column], seconds: FloatArray) -> dict[str, float]:
    """Shares of the pools' bytes by cause, weighted by the seconds of steps."""
    times = {name: float(np.asarray(waste[name], dtype=np.float64) @ seconds) for name in WASTE_COLUMNS}
    whole = sum(times.values())
    return {f"waste_{name}": time / whole for name, time in times.items()} if whole else {}


def _latencies(samples: Mapping[str, Samples]) -> NamedValues:
    levels = np.array(list(QUANTILES.values()))
    for name in ("ttft", "tpot", "itl", "e2e", "norm_latency", "queue"):
        mean = samples[name].mean()
        if mean is None:
            continue
        yield f"{name}_mean", mean
        quantiles = samples[name].quantiles(levels)
        yield from ((f"{name}_{short}", float(q)) for short, q in zip(QUANTILES, quantiles, strict=True))


def _throughput(totals: Totals, span_s: float) -> NamedValues:
    if span_s > 0:
        yield "request_throughput", totals["finished"] / span_s
        yield "output_throughput", totals["returned"] / span_s
        yield "generated_throughput", totals["generated"] / span_s
        yield "total_throughput", (totals["generated"] + totals["prompt_finished"]) / span_s
        yield "span", span_s


def _slots(totals: Totals, capacity_slots: int, kv_bytes_per_token: int) -> NamedValues:
    """Slot states weighted by the seconds of steps, so they cover the time in which requests run or wait."""
    capacity_time = capacity_slots * totals["seconds"]
    for state in SLOT_STATES:
        yield from _ratio(f"{state}_share", totals[f"{state}_time"], capacity_time)
    held = capacity_time - totals["free_time"] - totals["cached_time"] - totals["external_time"]
    yield from _ratio("gauge", held, capacity_time)
    allocated = totals["token_time"] + totals["reserved_time"] + totals["internal_time"]
    yield from _ratio("utilisation", totals["token_time"], allocated)
    yield from _ratio("reserved_of_allocated", totals["reserved_time"], allocated)
    yield from _ratio("internal_of_allocated", totals["internal_time"], allocated)
    logical = totals["logical_blocks_time"]
    yield from _ratio("sharing_saving", logical - totals["physical_blocks_time"], logical)
    yield from _ratio("tail_waste", totals["unfilled"], totals["decode_rows"])
    if totals["steps"]:
        yield "peak_kv", totals["peak_slots"] * kv_bytes_per_token


def _cache(totals: Totals) -> NamedValues:
    yield "hit_tokens", totals["hit_tokens"]
    yield "resumed_hit_tokens", totals["resumed_hit_tokens"]
    yield from _ratio("hit_ratio", totals["hit_tokens"], totals["prompt_scheduled"])


def _counts(totals: Totals) -> NamedValues:
    yield "steps", totals["steps"]
    yield "computed_tokens", totals["computed"]
    yield "blocks_allocated", totals["new_blocks"]
    yield from _ratio("copies_per_token", totals["copies"], totals["generated"])
    yield "recomputed_tokens", totals["recomputed_tokens"]
    yield "preemptions", totals["preemptions"]
    yield from _ratio("running_mean", totals["running_time"], totals["seconds"])
    yield "running_peak", totals["running_peak"]
    yield from _ratio("waiting_mean", totals["waiting_time"], totals["seconds"])


def _times(totals: Totals, span_s: float) -> NamedValues:
    seconds, attention = totals["seconds"], totals["attention"]
    yield from _ratio("step_mean", seconds, totals["steps"])
    yield from _ratio("busy_share", seconds, span_s)
    yield from _ratio("attention_per_step", attention, totals["steps"])
    yield from _ratio("attention_share", attention, seconds)
    yield from _ratio("attention_per_decode_step", totals["decode_attention"], totals["decode_steps"])
    yield from _ratio("kv_read_per_decode_step", totals["decode_kv"], totals["decode_steps"])
    yield from _ratio("attention_per_kv_token", totals["decode_attention"], totals["decode_kv"])


def _ratio(name: str, part: float, whole: float) -> NamedValues:
    if whole > 0:
        yield name, part / whole
