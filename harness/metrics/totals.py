"""What the metrics need of a run, as sums: of the whole run at once, or chunk after chunk in constant memory."""

from collections.abc import Mapping

import numpy as np

from harness.metrics.log import GENERATED, SLOT_STATES, Column, FloatArray, Outcome
from harness.metrics.samples import BinnedSamples, ExactSamples, Samples

Totals = dict[str, float]
PEAKS = ("peak_slots", "running_peak")
"""Totals that are the largest of their chunks, not the sum."""

LATENCIES = ("ttft", "tpot", "e2e", "norm_latency", "queue")
"""Distributions over finished requests; inter-token gaps come beside them."""


def as_floats(columns: Mapping[str, Column]) -> dict[str, FloatArray]:
    """All columns as float64."""
    return {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}


def step_totals(steps: Mapping[str, FloatArray]) -> Totals:
    """Sums over steps; integrals over time are in units of the column times seconds."""
    seconds, attention = steps["seconds"], steps["attention_s"]
    allocated = steps["token"] + steps["reserved"] + steps["internal"]
    only = np.logical_and(steps["prefill_tokens"] == 0, steps["decode_rows"] > 0)
    totals = {f"{name}_time": float(steps[name] @ seconds) for name in (*SLOT_STATES, *_OVER_TIME)}
    return totals | {
        "steps": float(len(seconds)),
        "seconds": float(seconds.sum()),
        "attention": float(attention.sum()),
        "rows": float(steps["rows"].sum()),
        "computed": float(steps["query_tokens"].sum()),
        "new_blocks": float(steps["new_blocks"].sum()),
        "copies": float(steps["copies"].sum()),
        "decode_attention": float(attention[only].sum()),
        "decode_steps": float(only.sum()),
        "decode_rows": float(steps["rows"][only].sum()),
        "decode_kv": float(steps["kv_read_tokens"][only].sum()),
        "unfilled": float((steps["reserved"] + steps["internal"])[only].sum()),
        "peak_slots": float(allocated.max(initial=0)),
        "running_peak": float(steps["running"].max(initial=0)),
    }


_OVER_TIME = ("logical_blocks", "physical_blocks", "running", "waiting")


def request_totals(requests: Mapping[str, FloatArray]) -> Totals:
    """Sums over requests."""
    finished = requests["outcome"] == Outcome.FINISHED
    whole = requests["output_tokens"] * requests["width"]
    generated = requests.get(GENERATED, whole)[finished]
    scheduled = np.isfinite(requests["first_scheduled_s"])
    totals = {name: float(requests[name].sum()) for name in _SUMMED}
    return totals | {
        "finished": float(finished.sum()),
        "generated": float(generated.sum()),
        "prompt_finished": float(requests["prompt_tokens"][finished].sum()),
        "prompt_scheduled": float(requests["prompt_tokens"][scheduled].sum()),
    }


_SUMMED = ("hit_tokens", "resumed_hit_tokens", "recomputed_tokens", "preemptions")


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

    Sums are folded chunk by chunk: whoever feeds them must cut chunks at places that depend on the run alone.
    """

    def __init__(self) -> None:
        self._totals: Totals = step_totals(_EMPTY_STEPS) | request_totals(_EMPTY_REQUESTS)
        self._samples = {name: BinnedSamples() for name in LATENCIES}
        self._samples["itl"] = BinnedSamples(whole_ns=True)

    def add_steps(self, steps: Mapping[str, Column]) -> None:
        """The next steps, columns as in `RunLog.steps`."""
        self._fold(step_totals(as_floats(steps)))

    def add_requests(self, requests: Mapping[str, Column]) -> None:
        """Requests that ended, or never will; columns as in `RunLog.requests`."""
        columns = as_floats(requests)
        self._fold(request_totals(columns))
        for name, values in latencies(columns).items():
            self._samples[name].add(values)

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """Inter-token gaps, each standing for so many."""
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


_NONE = np.empty(0)
_EMPTY_STEPS = dict.fromkeys(
    (
        *("seconds", "attention_s", "prefill_tokens", "decode_rows", "query_tokens", "new_blocks", "copies"),
        *("rows", "kv_read_tokens"),
        *SLOT_STATES,
        *_OVER_TIME,
    ),
    _NONE,
)
_EMPTY_REQUESTS = dict.fromkeys(
    (*_SUMMED, "outcome", "output_tokens", "width", "first_scheduled_s", "prompt_tokens"), _NONE
)
