"""The step table of a replay: a row for each step, gathered plan by plan."""

from collections.abc import Sequence

import numpy as np

from engine.core.memory.manager import FastForwardColumns
from engine.core.plan import StepPlan
from harness.metrics.log import STEP_COLUMNS, Column, IntArray
from harness.replay.cost_model import Amount
from harness.replay.executors import StepTiming
from harness.replay.features import feature_index
from harness.replay.virtual_time import to_s

PHASES = ("policy_s", "build_s", "forward_s", "sample_s", "pace")
_COMPUTED = ("step", "start_s", "seconds", "attention_s", "reserved")  # columns that `drain()` computes
_GIVEN = tuple(name for name in STEP_COLUMNS if name not in _COMPUTED)
_FIRST_ONLY = ("copies", "preempted", "admitted", "hit_tokens")
_GROWING = ("kv_read_tokens", "token")  # by one a row and step
_CHANGING = (
    *("new_blocks", "frees", "cached", "internal", "external", "free"),
    *("logical_blocks", "physical_blocks"),
)
_UNKNOWN = (np.nan,) * len(PHASES)
_ROWS, _DECODE, _PREFILL, _TOKENS, _DECODE_KV, _PREFILL_KV, _SAMPLED = feature_index(
    ("rows", "decode_rows", "prefill_tokens", "tokens", "decode_kv", "prefill_kv", "sampled_rows")
)


class StepTable:
    """Gathers plans; a fast-forward is one entry until `drain()` turns it into rows."""

    def __init__(self) -> None:
        self._forget()
        self._drained = 0
        self._end_ns = 0
        self._capacity = 0

    def _forget(self) -> None:
        self._values: list[tuple[Amount, ...]] = []
        self._starts: list[int] = []
        self._steps: list[int] = []
        self._ns: list[int] = []
        self._attention_s: list[float] = []
        self._fast_forwards: list[FastForwardColumns] = []

    @property
    def end_s(self) -> float:
        """End of the last step, in seconds."""
        return float(to_s(self._end_ns))

    @property
    def pending(self) -> int:
        """Steps that have not been drained."""
        return len(self._ns)

    def add(
        self,
        now_ns: int,
        plan: StepPlan,
        timing: StepTiming,
        fast_forward: FastForwardColumns | None,
        features: Sequence[Amount],
        took_ns: int,
    ) -> None:
        """A plan that began at `now_ns` and ran once, or as often as `timing` has entries, `took_ns` in all."""
        self._values.append(_values(plan, timing, features))
        self._starts.append(now_ns)
        self._steps.append(len(timing.ns))
        self._ns += timing.ns
        self._attention_s += timing.attention_s
        self._end_ns = now_ns + took_ns
        if fast_forward is not None:
            self._fast_forwards.append(fast_forward)
        if not self._capacity:
            self._capacity = plan.usage.capacity

    def drain(self) -> dict[str, Column]:
        """Every column of STEP_COLUMNS, one entry per step; counts int64, times float64 s. The table is empty then."""
        steps = np.array(self._steps, dtype=np.int64)
        facts = np.array(self._values, dtype=np.float64).reshape(-1, len(_GIVEN)).repeat(steps, axis=0)
        found: dict[str, Column] = {
            name: facts[:, index] if name in PHASES else facts[:, index].astype(np.int64)
            for index, name in enumerate(_GIVEN)
        }
        nth = np.arange(steps.sum()) - (np.cumsum(steps) - steps).repeat(steps)
        self._add_times(found, steps, nth)
        self._add_fast_forwards(found, nth)
        states = ("token", "cached", "internal", "external", "free")
        found["reserved"] = self._capacity - np.sum([found[name] for name in states], axis=0)
        self._drained += len(nth)
        self._forget()
        return {name: found[name] for name in STEP_COLUMNS}

    def _add_times(self, found: dict[str, Column], steps: IntArray, nth: IntArray) -> None:
        ns = np.array(self._ns, dtype=np.int64)
        before = np.cumsum(ns) - ns  # within all steps; of each plan's first step it is the plan's own offset
        begun = np.array(self._starts, dtype=np.int64).repeat(steps)
        found["step"] = self._drained + np.arange(len(ns))
        found["start_s"] = to_s(begun + before - before[nth == 0].repeat(steps))
        found["seconds"] = to_s(ns)
        found["attention_s"] = np.array(self._attention_s, dtype=np.float64)

    def _add_fast_forwards(self, found: dict[str, Column], nth: IntArray) -> None:
        """The further steps of a fast-forward: as the first, but for context and what the pool did."""
        further = nth > 0
        for name in _FIRST_ONLY:
            found[name][further] = 0
        for name in _GROWING:
            found[name] += found["rows"] * nth
        for name in _CHANGING:
            if self._fast_forwards:
                found[name][further] = np.concatenate([getattr(part, name) for part in self._fast_forwards])


def _values(plan: StepPlan, timing: StepTiming, features: Sequence[Amount]) -> tuple[Amount, ...]:
    """The plan's values in the order of STEP_COLUMNS, without `_COMPUTED`; `features` are those of its first step."""
    usage, phases = plan.usage, timing.phases
    return (
        *((phases.get(phase, np.nan) for phase in PHASES) if phases else _UNKNOWN),
        *_of_rows(features),
        plan.new_blocks,
        len(plan.copies),
        len(plan.frees),
        len(plan.preempted),
        len(plan.admitted),
        plan.hit_tokens,
        plan.running,
        plan.waiting,
        usage.token,
        usage.cached,
        usage.internal,
        usage.external,
        usage.free,
        usage.logical_blocks,
        usage.physical_blocks,
    )


def _of_rows(features: Sequence[Amount]) -> tuple[Amount, ...]:
    """Rows, decode rows, prefill tokens, query tokens, KV slots read, sampled rows."""
    return (
        features[_ROWS],
        features[_DECODE],
        features[_PREFILL],
        features[_TOKENS],
        features[_DECODE_KV] + features[_PREFILL_KV],
        features[_SAMPLED],
    )
