"""The log of the compiled replay as the columns of a run log."""

import numpy as np

from harness.metrics.log import GENERATED, REQUEST_COLUMNS, STEP_COLUMNS, Column, Outcome
from harness.sim.clock import to_s
from harness.sim.compiled.state import COUNTS, ENDED, GAPS, NEVER, STEPS, FloatArray, IntArray, Run

_NS = ("start_ns", "ns")
_UNKNOWN = ("policy_s", "build_s", "forward_s", "sample_s")
_STATES = ("token", "cached", "internal", "free")


def step_columns(run: Run, before: int, capacity_slots: int) -> dict[str, Column]:
    """The logged steps as in `RunLog.steps`; `before` steps were logged and taken out before."""
    count = run.at[STEPS]
    counts = run.log.counts[:count]
    found: dict[str, Column] = {name: counts[:, i].copy() for i, name in enumerate(COUNTS) if name not in _NS}
    found |= {name: np.full(count, np.nan) for name in _UNKNOWN}
    found["step"] = before + np.arange(count)
    found["start_s"], found["seconds"] = to_s(counts[:, 0]), to_s(counts[:, 1])
    found["attention_s"] = run.log.attention_s[:count].copy()
    found["logical_blocks"] = found["physical_blocks"]
    found["reserved"] = capacity_slots - np.sum([found[name] for name in _STATES], axis=0)
    nothing = np.zeros(count, dtype=np.int64)
    return {name: found.get(name, nothing) for name in STEP_COLUMNS}


def gaps(run: Run) -> tuple[FloatArray, FloatArray]:
    """The logged gaps between tokens in seconds, and how often each occurred."""
    count = run.at[GAPS]
    return to_s(run.log.gap_ns[:count]), run.log.gap_weight[:count].astype(np.float64)


def request_columns(run: Run, request_ids: IntArray, first: int, last: int) -> dict[str, Column]:
    """The requests that ended as number `first` … `last - 1`, in order of arrival, as in `RunLog.requests`."""
    lives, lengths = run.lives, run.lengths
    who = np.sort(lives.ended[first : min(last, run.at[ENDED])])
    nothing = np.zeros(len(who), dtype=np.int64)
    found: dict[str, Column] = {
        "request_id": request_ids[who],
        "arrival_s": to_s(lengths.arrival_ns[who]),
        "first_scheduled_s": _moment(lives.scheduled[who]),
        "first_token_s": _moment(lives.first_token[who]),
        "finish_s": _moment(lives.finish[who]),
        "prompt_tokens": lengths.prompt[who],
        "output_tokens": lengths.output[who],
        "width": nothing + 1,
        "resumed_hit_tokens": lives.resumed_hits[who],
        "recomputed_tokens": lives.recomputed[who],
        "preemptions": lives.preemptions[who],
        "outcome": np.where(lengths.fits[who] == 1, Outcome.FINISHED, Outcome.REJECTED),
    }
    table = {name: found.get(name, nothing) for name in REQUEST_COLUMNS}
    return {**table, GENERATED: lengths.output[who]}


def _moment(ns: IntArray) -> FloatArray:
    return np.where(ns == NEVER, np.nan, to_s(ns))
