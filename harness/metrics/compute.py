"""From a run log to metrics. `harness.metrics` has the definitions in words and the units.

Metrics are computed from sums and samples of a run: from the whole log at once, or chunk after chunk in constant
memory. Latency quantiles come from all samples (`ExactSamples`) or from counts in narrow bins (`BinnedSamples`).
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from harness.metrics import METRICS, QUANTILES
from harness.metrics.log import (
    GENERATED,
    REQUEST_COLUMNS,
    RETURNED,
    SLOT_STATES,
    STEP_COLUMNS,
    STEP_COUNTS,
    WASTE_COLUMNS,
    Column,
    FloatArray,
    Outcome,
    RunLog,
)

Totals = dict[str, float]
PEAKS = ("peak_slots", "running_peak")
"""Totals that are the largest of their chunks, not the sum."""

LATENCIES = ("ttft", "tpot", "e2e", "norm_latency", "queue")
"""Distributions over finished requests; inter-token gaps are kept apart."""

# columns of steps that are integrated over time, and columns of requests that are summed
_OVER_TIME = ("logical_blocks", "physical_blocks", "running", "waiting")
_SUMMED = ("hit_tokens", "resumed_hit_tokens", "recomputed_tokens", "preemptions")
_NONE = np.empty(0)
_EMPTY_STEPS = dict.fromkeys(STEP_COLUMNS, _NONE)
_EMPTY_REQUESTS = dict.fromkeys(REQUEST_COLUMNS, _NONE)


def weighted_mean(values: FloatArray, weights: FloatArray) -> float | None:
    """Mean of `values`; None where no sample has weight."""
    total = float(weights.sum())
    return float(values @ weights) / total if total > 0 else None


def weighted_quantiles(values: FloatArray, weights: FloatArray, levels: FloatArray) -> FloatArray:
    """Quantiles at `levels` (0 to 1) of samples that each stand for an integral `weight` of equal samples.

    Equal to `numpy.quantile(numpy.repeat(values, weights), levels)`: linear between order statistics. At
    least one sample must have weight.
    """
    order = np.argsort(values, kind="stable")
    order = order[weights[order] > 0]
    ranked, ends = values[order], np.cumsum(weights[order])
    position = levels * (ends[-1] - 1)
    low = ranked[np.searchsorted(ends, np.floor(position), side="right")]
    high = ranked[np.searchsorted(ends, np.ceil(position), side="right")]
    return np.asarray(low + (high - low) * (position - np.floor(position)), dtype=np.float64)


class Samples(Protocol):
    """Weighted samples of one quantity."""

    def mean(self) -> float | None:
        """Their mean; None where there is none."""

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """Their quantiles at `levels` (0 to 1); at least one sample must have weight."""


class ExactSamples:
    """All samples as an array. NaN samples (the event did not happen) are left out."""

    def __init__(self, values: FloatArray, weights: FloatArray | None = None) -> None:
        weights = np.ones_like(values) if weights is None else weights
        known = np.isfinite(values) & (weights > 0)
        self._values, self._weights = values[known], weights[known]

    def mean(self) -> float | None:
        """Their mean; None where there is none."""
        return weighted_mean(self._values, self._weights)

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """Linear between order statistics."""
        return weighted_quantiles(self._values, self._weights, levels)


class BinnedSamples:
    """Counts of samples in bins whose ends differ by 0.2 %: quantiles are right within 0.1 %, means are exact.

    18,000 bins reach from a nanosecond to half a year; smaller and larger samples count in the outermost bins. Counts
    are whole numbers, so quantiles do not depend on the order of samples. With `whole_ns` samples are summed as whole
    nanoseconds, so the mean does not depend on it either.
    """

    GROWTH, LOWEST, BINS = 1.002, 1e-9, 18_000

    def __init__(self, *, whole_ns: bool = False) -> None:
        self._counts = np.zeros(self.BINS + 1, dtype=np.int64)
        self._whole_ns = whole_ns
        self._sum: float = 0
        self._least, self._most = np.inf, -np.inf

    def add(self, values: FloatArray, weights: FloatArray | None = None) -> None:
        """Count samples; NaN and infinite ones are left out."""
        weights = np.ones_like(values) if weights is None else weights
        known = np.isfinite(values) & (weights > 0)
        values, weights = values[known], weights[known]
        if not len(values):
            return
        place = np.log(np.maximum(values, self.LOWEST) / self.LOWEST) / np.log(self.GROWTH)
        index = np.minimum(place.astype(np.int64) + 1, self.BINS)
        index[values < self.LOWEST] = 0
        self._counts += np.bincount(index, weights=weights, minlength=self.BINS + 1).astype(np.int64)
        self._sum += self._total(values, weights)
        self._least, self._most = min(self._least, values.min()), max(self._most, values.max())

    def _total(self, values: FloatArray, weights: FloatArray) -> float:
        if not self._whole_ns:
            return float(values @ weights)
        return int(np.rint(values * 1e9).astype(np.int64) @ weights.astype(np.int64))

    def mean(self) -> float | None:
        """Their mean; None where there is none."""
        total = int(self._counts.sum())
        return self._sum / total / (1e9 if self._whole_ns else 1) if total else None

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """The quantiles, linear between the middles of the bins of both samples beside each (`numpy.quantile`).

        They lie within the smallest and the largest sample.
        """
        ends = np.cumsum(self._counts)
        place = levels * (ends[-1] - 1)
        index = np.searchsorted(ends, [np.floor(place), np.ceil(place)], side="right")
        middle = np.where(index == 0, 0.0, self.LOWEST * self.GROWTH ** (index - 0.5))
        low, high = np.clip(middle, self._least, self._most)
        return np.asarray(low + (high - low) * (place % 1), dtype=np.float64)


def as_floats(columns: Mapping[str, Column]) -> dict[str, FloatArray]:
    """All columns as float64."""
    return {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}


def step_totals(steps: Mapping[str, FloatArray]) -> Totals:
    """Sums over steps; integrals over time are in units of the column times seconds."""
    seconds, attention = steps["seconds"], steps["attention_s"]
    allocated = steps["token"] + steps["reserved"] + steps["internal"]
    only = np.logical_and(steps["prefill_tokens"] == 0, steps["decode_rows"] > 0)
    totals = {f"{name}_time": float(steps[name] @ seconds) for name in (*SLOT_STATES, *_OVER_TIME)}
    totals |= {f"{name}_sum": float(steps[name].sum()) for name in STEP_COUNTS}
    return totals | {
        "steps": float(len(seconds)),
        "seconds": float(seconds.sum()),
        "attention": float(attention.sum()),
        "decode_attention": float(attention[only].sum()),
        "decode_steps": float(only.sum()),
        "decode_rows": float(steps["rows"][only].sum()),
        "decode_kv": float(steps["kv_read_tokens"][only].sum()),
        "unfilled": float((steps["reserved"] + steps["internal"])[only].sum()),
        "peak_slots": float(allocated.max(initial=0)),
        "running_peak": float(steps["running"].max(initial=0)),
    }


def request_totals(requests: Mapping[str, FloatArray]) -> Totals:
    """Sums over requests."""
    finished = requests["outcome"] == Outcome.FINISHED
    generated = requests.get(GENERATED, requests["output_tokens"] * requests["width"])
    returned = requests.get(RETURNED, generated)[finished]
    scheduled = np.isfinite(requests["first_scheduled_s"])
    totals = {name: float(requests[name].sum()) for name in _SUMMED}
    return totals | {
        "finished": float(finished.sum()),
        "generated": float(generated[finished].sum()),
        "returned": float(returned.sum()),
        "prompt_finished": float(requests["prompt_tokens"][finished].sum()),
        "prompt_scheduled": float(requests["prompt_tokens"][scheduled].sum()),
    }


def latencies(requests: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Samples of each of LATENCIES, of the finished requests."""
    finished = requests["outcome"] == Outcome.FINISHED
    done = {name: column[finished] for name, column in requests.items()}
    ttft = done["first_token_s"] - done["arrival_s"]
    e2e = done["finish_s"] - done["arrival_s"]
    output = done["output_tokens"]
    many = output > 1
    return {
        "ttft": ttft,
        "tpot": (e2e - ttft)[many] / (output[many] - 1),
        "e2e": e2e,
        "norm_latency": e2e[output > 0] / output[output > 0],
        "queue": done["first_scheduled_s"] - done["arrival_s"],
    }


class RunningTotals:
    """Totals and distributions of a run that is still under way, in constant memory.

    Call `add_steps`, `add_requests` and `add_gaps` with one chunk after another. The caller must cut chunks at places
    that depend on the run alone, because sums are added chunk by chunk.
    """

    def __init__(self) -> None:
        self._totals: Totals = step_totals(_EMPTY_STEPS) | request_totals(_EMPTY_REQUESTS)
        self._samples = {name: BinnedSamples() for name in LATENCIES}
        self._samples["itl"] = BinnedSamples(whole_ns=True)

    def add_steps(self, steps: Mapping[str, Column]) -> None:
        """The next steps, columns as in `RunLog.steps`."""
        self._fold(step_totals(as_floats(steps)))

    def add_requests(self, requests: Mapping[str, Column]) -> None:
        """Requests that ended or are left at the end; columns as in `RunLog.requests`."""
        columns = as_floats(requests)
        self._fold(request_totals(columns))
        for name, values in latencies(columns).items():
            self._samples[name].add(values)

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """Inter-token gaps; each stands for its weight of equal gaps."""
        self._samples["itl"].add(seconds, weights)

    def _fold(self, more: Totals) -> None:
        for name, value in more.items():
            mine = self._totals[name]
            self._totals[name] = max(mine, value) if name in PEAKS else mine + value

    @property
    def totals(self) -> Totals:
        """The sums so far."""
        return self._totals

    @property
    def samples(self) -> Mapping[str, Samples]:
        """The distributions so far."""
        return self._samples


def exact_samples(
    requests: Mapping[str, FloatArray], itl_s: FloatArray, itl_weight: FloatArray
) -> dict[str, Samples]:
    """The distributions of a finished run."""
    found: dict[str, Samples] = {name: ExactSamples(values) for name, values in latencies(requests).items()}
    found["itl"] = ExactSamples(np.asarray(itl_s, np.float64), np.asarray(itl_weight, np.float64))
    return found


NamedValues = Iterator[tuple[str, float]]


def compute_metrics(log: RunLog, of_steps: Totals | None = None) -> dict[str, float]:
    """Every metric of `METRICS` that is defined for this run, by name, in the metric's unit.

    Latencies cover finished requests. A metric without a single sample (an empty log, a TPOT where all
    outputs are one token) is absent; no value is NaN or infinite. `of_steps` are its `step_totals`, where known.
    """
    requests = as_floats(log.requests)
    totals = (of_steps or step_totals(as_floats(log.steps))) | request_totals(requests)
    samples = exact_samples(requests, log.itl_s, log.itl_weight)
    sizes = (log.span_s, log.capacity_slots, log.kv_bytes_per_token)
    found = metrics_of_totals(totals, samples, *sizes, replicas=log.replicas)
    if log.optimal_hit_tokens is not None:
        found["optimal_hit_tokens"] = log.optimal_hit_tokens
        found |= dict(_ratio("optimal_hit_ratio", log.optimal_hit_tokens, totals["prompt_scheduled"]))
    found |= log.tiers or {}
    if log.waste is None:
        return found
    seconds, waste = log.steps["seconds"], log.waste
    return found | waste_shares({of: float(waste[of].astype(np.float64) @ seconds) for of in WASTE_COLUMNS})


_MOST_TENANTS = 20  # by their prompt tokens; all others together are `OTHERS`
OTHERS = "(others)"


def by_tenant(
    log: RunLog, tenant_of: Mapping[int, str], pool: int = 0, *, cached: bool = True
) -> dict[str, dict[str, float]]:
    """What each tenant asks for and gets, the largest first; empty where there are fewer than two, or no rows.

    `hit_ratio` is hit tokens / prompt tokens of the scheduled requests, absent where none was or nothing is `cached`;
    `waiting_mean` seconds from arrival until they are scheduled first. `occupancy` is the share of the pool over the
    span that the finished requests ask for: prompt and half of the output, from first schedule to end; a block that
    several share counts for each. A replica's `pool` has so many tokens; 0: as many as slots.
    """
    rows = as_floats(log.requests)
    names = np.array([tenant_of.get(int(each), "") for each in rows["request_id"]])
    sizes = {name: float(rows["prompt_tokens"][names == name].sum()) for name in np.unique(names)}
    largest = sorted(sizes, key=lambda name: -sizes[name])
    groups = [(str(name) or "(none)", names == name) for name in largest[:_MOST_TENANTS]]
    if rest := largest[_MOST_TENANTS:]:
        groups.append((OTHERS, np.isin(names, rest)))
    if len(groups) < 2:
        return {}
    found, whole_s = {}, (pool or log.capacity_slots) * log.replicas * log.span_s
    for name, own in groups:
        scheduled = own & np.isfinite(rows["first_scheduled_s"])
        ended = scheduled & np.isfinite(rows["finish_s"])
        hit, asked = (float(rows[of][scheduled].sum()) for of in ("hit_tokens", "prompt_tokens"))
        held = rows["prompt_tokens"] + rows["output_tokens"] * rows["width"] / 2
        held_s = (held * (rows["finish_s"] - rows["first_scheduled_s"]))[ended].sum()
        waits = (rows["first_scheduled_s"] - rows["arrival_s"])[scheduled]
        found[name] = {
            "requests": float(own.sum()),
            "prompt_tokens": sizes.get(name, float(rows["prompt_tokens"][own].sum())),
            **dict(_ratio("hit_ratio", hit, asked if cached else 0.0)),
            "waiting_mean": float(waits.mean()) if len(waits) else 0.0,
            "occupancy": float(held_s / whole_s) if whole_s else 0.0,
        }
    return found


def tenants_of_sides(
    logs: Mapping[str, RunLog], tenant_of: Mapping[int, str], pool: int, *, cached: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """`by_tenant` of each side, the first of which is the simulated one; empty with fewer than two tenants."""
    if len(set(tenant_of.values())) < 2 or not len(next(iter(logs.values())).requests["request_id"]):
        return {}
    return {side: by_tenant(log, tenant_of, pool, cached=cached) for side, log in logs.items()}


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
        **{name: totals[metric.total] for name, metric in METRICS.items() if metric.total is not None},
        **dict(_counts(totals)),
        **dict(_times(totals, span_s * replicas)),
    }
    return {name: found[name] for name in METRICS if name in found and np.isfinite(found[name])}


def waste_shares(times: Mapping[str, float]) -> dict[str, float]:
    """Shares of the pools' bytes by cause, from bytes times seconds of all steps."""
    whole = sum(times.values())
    return {f"waste_{name}": time / whole for name, time in times.items()} if whole else {}


def _latencies(samples: Mapping[str, Samples]) -> NamedValues:
    levels = np.array(list(QUANTILES.values()))
    for name in ("ttft", "tpot", "itl", "e2e", "norm_latency", "queue"):
        if (mean := samples[name].mean()) is None:
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


def _counts(totals: Totals) -> NamedValues:
    yield from _ratio("hit_ratio", totals["hit_tokens"], totals["prompt_scheduled"])
    yield from _ratio("copies_per_token", totals["copies_sum"], totals["generated"])
    yield from _ratio("running_mean", totals["running_time"], totals["seconds"])
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
