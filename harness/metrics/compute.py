"""From a run log to figures of merit. Definitions, in words and with units: `harness.metrics.definitions`."""

from collections.abc import Iterator, Mapping

import numpy as np

from harness.metrics.definitions import QUANTILES
from harness.metrics.log import SLOT_STATES, Column, FloatArray, Outcome, RunLog
from harness.metrics.weighted import weighted_mean, weighted_quantiles

Figures = Iterator[tuple[str, float]]


def compute_metrics(log: RunLog) -> dict[str, float]:
    """Every metric of `METRICS` that is defined for this run, by name, in the metric's unit.

    Latencies cover finished requests. A metric without a single sample (an empty log, a TPOT where all
    outputs are one token) is absent; no value is NaN or infinite.
    """
    figures = dict(_all_metrics(log))
    return {name: value for name, value in figures.items() if np.isfinite(value)}


def _all_metrics(log: RunLog) -> Figures:
    steps = {name: np.asarray(column, dtype=np.float64) for name, column in log.steps.items()}
    requests = {name: np.asarray(column, dtype=np.float64) for name, column in log.requests.items()}
    finished = requests["outcome"] == Outcome.FINISHED
    done = {name: column[finished] for name, column in requests.items()}
    generated = float((done["output_tokens"] * done["width"]).sum())
    yield from _latencies(done, log)
    yield from _throughput(done, generated, log.span_s)
    yield from _slots(steps, log)
    yield from _cache(requests)
    yield "finished", float(finished.sum())
    yield from _counts(steps, requests, generated)
    yield from _times(steps, log.span_s)


def _latencies(done: Mapping[str, FloatArray], log: RunLog) -> Figures:
    ttft = done["first_token_s"] - done["arrival_s"]
    e2e = done["finish_s"] - done["arrival_s"]
    output = done["output_tokens"]
    many = output > 1
    yield from _distribution("ttft", ttft)
    yield from _distribution("tpot", (e2e - ttft)[many] / (output[many] - 1))
    yield from _distribution("itl", np.asarray(log.itl_s, np.float64), np.asarray(log.itl_weight, np.float64))
    yield from _distribution("e2e", e2e)
    yield from _distribution("norm_latency", e2e[output > 0] / output[output > 0])
    yield from _distribution("queue", done["first_scheduled_s"] - done["arrival_s"])


def _distribution(name: str, values: FloatArray, weights: FloatArray | None = None) -> Figures:
    """Mean and quantiles; samples that are not numbers (it did not happen) are left out."""
    weights = np.ones_like(values) if weights is None else weights
    known = np.isfinite(values) & (weights > 0)
    mean = weighted_mean(values[known], weights[known])
    if mean is None:
        return
    yield f"{name}_mean", mean
    levels = np.array(list(QUANTILES.values()))
    quantiles = weighted_quantiles(values[known], weights[known], levels)
    yield from ((f"{name}_{short}", float(q)) for short, q in zip(QUANTILES, quantiles, strict=True))


def _throughput(done: Mapping[str, FloatArray], generated: float, span_s: float) -> Figures:
    if span_s > 0:
        yield "request_throughput", len(done["finish_s"]) / span_s
        yield "output_throughput", generated / span_s
        yield "total_throughput", (generated + float(done["prompt_tokens"].sum())) / span_s
        yield "span", span_s


def _slots(steps: Mapping[str, FloatArray], log: RunLog) -> Figures:
    """Steps tile the time in which requests run or wait: weighted by seconds, figures cover just that."""
    integral = {name: float(steps[name] @ steps["seconds"]) for name in SLOT_STATES}
    capacity_time = log.capacity_slots * float(steps["seconds"].sum())
    for state in SLOT_STATES:
        yield from _ratio(f"{state}_share", integral[state], capacity_time)
    allocated = integral["token"] + integral["reserved"] + integral["internal"]
    yield from _ratio("utilisation", integral["token"], allocated)
    yield from _ratio("reserved_of_allocated", integral["reserved"], allocated)
    yield from _ratio("internal_of_allocated", integral["internal"], allocated)
    logical = float(steps["logical_blocks"] @ steps["seconds"])
    yield from _ratio("sharing_saving", logical - float(steps["physical_blocks"] @ steps["seconds"]), logical)
    only_decode = _only_decode(steps)
    unfilled = (steps["reserved"] + steps["internal"])[only_decode]
    yield from _ratio("tail_waste", float(unfilled.sum()), float(steps["rows"][only_decode].sum()))
    if len(steps["token"]):
        peak = float((steps["token"] + steps["reserved"] + steps["internal"]).max())
        yield "peak_kv", peak * log.kv_bytes_per_token


def _cache(requests: Mapping[str, FloatArray]) -> Figures:
    scheduled = np.isfinite(requests["first_scheduled_s"])
    hits = float(requests["hit_tokens"].sum())
    yield "hit_tokens", hits
    yield "resumed_hit_tokens", float(requests["resumed_hit_tokens"].sum())
    yield from _ratio("hit_ratio", hits, float(requests["prompt_tokens"][scheduled].sum()))


def _counts(steps: Mapping[str, FloatArray], requests: Mapping[str, FloatArray], generated: float) -> Figures:
    seconds = steps["seconds"]
    yield "steps", float(len(seconds))
    yield "computed_tokens", float(steps["query_tokens"].sum())
    yield "blocks_allocated", float(steps["new_blocks"].sum())
    yield from _ratio("copies_per_token", float(steps["copies"].sum()), generated)
    yield "recomputed_tokens", float(requests["recomputed_tokens"].sum())
    yield "preemptions", float(requests["preemptions"].sum())
    yield from _ratio("running_mean", float(steps["running"] @ seconds), float(seconds.sum()))
    yield "running_peak", float(steps["running"].max(initial=0))
    yield from _ratio("waiting_mean", float(steps["waiting"] @ seconds), float(seconds.sum()))


def _times(steps: Mapping[str, FloatArray], span_s: float) -> Figures:
    seconds, attention = steps["seconds"], steps["attention_s"]
    total = float(seconds.sum())
    yield from _ratio("step_mean", total, len(seconds))
    yield from _ratio("busy_share", total, span_s)
    yield from _ratio("attention_per_step", float(attention.sum()), len(seconds))
    yield from _ratio("attention_share", float(attention.sum()), total)
    only_decode = _only_decode(steps)
    decoding = float(attention[only_decode].sum())
    yield from _ratio("attention_per_decode_step", decoding, int(only_decode.sum()))
    yield from _ratio("attention_per_kv_token", decoding, float(steps["kv_read_tokens"][only_decode].sum()))


def _only_decode(steps: Mapping[str, FloatArray]) -> Column:
    only: Column = np.logical_and(steps["prefill_tokens"] == 0, steps["decode_rows"] > 0)
    return only


def _ratio(name: str, part: float, whole: float) -> Figures:
    if whole > 0:
        yield name, part / whole
