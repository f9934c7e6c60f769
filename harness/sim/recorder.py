"""What a replay leaves behind, gathered step by step: the run log, and, on request, what a second look needs.

Nothing here is timed: the replay records between the steps.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.core.manager import LeapColumns
from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from harness.metrics.log import STEP_COLUMNS, Column, RunLog
from harness.sim.clock import NsArray, to_s
from harness.sim.executors import StepTiming
from harness.sim.features import FEATURES, FloatArray, step_features
from harness.sim.request_times import RequestTimes

PHASES = ("policy_s", "build_s", "forward_s", "sample_s")
PLAN_COLUMNS = ("rows", "decode_rows", "prefill_tokens", "query_tokens", "sampled_rows", "running", "waiting")
FIRST_ONLY = ("copies", "preempted", "admitted", "hit_tokens")
LEAPING = (
    *("new_blocks", "frees", "cached", "internal", "external", "free"),
    *("logical_blocks", "physical_blocks"),
)
COLUMN = {name: index for index, name in enumerate(STEP_COLUMNS)}
SECONDS = {"start_s", "seconds", "attention_s", *PHASES}


class Recorder:
    """Collects one replay.

    With `keep_plans` it also keeps each plan's digest, its features and its beams' parents: to compare two replays step
    by step, to price a measured run's plans, and to calibrate. Only for replays without fast-forward.
    """

    def __init__(
        self, requests: Sequence[Request], arrival_ns: Sequence[int], block_size: int, *, keep_plans: bool
    ):
        self._block_size = block_size
        self._requests = {request.request_id: request for request in requests}
        self.times = RequestTimes(requests, arrival_ns)
        self._tables: list[FloatArray] = []
        self._step = 0
        self._end_ns = 0
        self._keep_plans = keep_plans
        self.digests: list[str] = []
        self.parents: list[Mapping[int, Sequence[int]]] = []
        self.step_ns: list[int] = []
        self._features: list[FloatArray] = []

    @property
    def features(self) -> FloatArray:
        """Features of every step, `[steps, len(FEATURES)]`; with `keep_plans` only."""
        return np.concatenate(self._features) if self._features else np.zeros((0, len(FEATURES)))

    def record(
        self, now_ns: int, plan: StepPlan, result: StepResult, report: CommitReport, timing: StepTiming
    ) -> None:
        """One plan, taken `result.repeat` times, from `now_ns` on."""
        ends = now_ns + np.cumsum(timing.ns)
        starts = ends - timing.ns
        table = np.zeros((result.repeat, len(COLUMN)))
        self._add_step_columns(table, plan, timing, starts)
        self._add_pool_columns(table, plan, report.leap)
        self._tables.append(table)
        self.times.step(plan, report, starts, ends)
        self._step += result.repeat
        self._end_ns = int(ends[-1])
        if self._keep_plans:
            self.digests.append(plan.digest())
            self.parents.append(result.parents)
            self.step_ns.append(int(timing.ns[0]))
            self._features.append(step_features(plan, self._requests, self._block_size))

    def _add_step_columns(
        self, table: FloatArray, plan: StepPlan, timing: StepTiming, starts: NsArray
    ) -> None:
        steps, rows, tokens = len(table), len(plan.rows), int(plan.query_len.sum())
        decode = int((plan.query_len == 1).sum())
        later = np.arange(steps)
        self._set(table, "step", self._step + later)
        self._set(table, "start_s", to_s(starts))
        self._set(table, "seconds", to_s(timing.ns))
        self._set(table, "attention_s", timing.attention_s)
        for phase in PHASES:
            self._set(table, phase, timing.phases.get(phase, np.nan))
        facts = (rows, decode, tokens - decode, tokens, sum(row.samples for row in plan.rows))
        for name, value in zip(PLAN_COLUMNS, (*facts, plan.running, plan.waiting), strict=True):
            self._set(table, name, value)
        self._set(table, "kv_read_tokens", int(plan.context_len.sum()) + tokens + rows * later)
        firsts = (len(plan.copies), len(plan.preempted), len(plan.admitted), plan.hit_tokens)
        for name, value in zip(FIRST_ONLY, firsts, strict=True):
            table[0, COLUMN[name]] = value

    def _add_pool_columns(self, table: FloatArray, plan: StepPlan, leap: LeapColumns | None) -> None:
        """Slot states while each step runs; in a fast-forward they follow from the blocks taken."""
        usage = plan.usage
        for name in ("cached", "internal", "external", "free", "logical_blocks", "physical_blocks"):
            table[0, COLUMN[name]] = getattr(usage, name)
        table[0, COLUMN["new_blocks"]] = plan.new_blocks
        table[0, COLUMN["frees"]] = len(plan.frees)
        if leap is not None:
            for name in LEAPING:
                table[1:, COLUMN[name]] = getattr(leap, name)
        self._set(table, "token", usage.token + len(plan.rows) * np.arange(len(table)))
        others = table[:, [COLUMN[name] for name in ("token", "cached", "internal", "external", "free")]]
        self._set(table, "reserved", usage.capacity - others.sum(axis=1))

    @staticmethod
    def _set(table: FloatArray, name: str, value: FloatArray | NsArray | float) -> None:
        table[:, COLUMN[name]] = value

    def log(self, stats: Mapping[int, RequestStats], capacity_slots: int, kv_bytes_per_token: int) -> RunLog:
        """The finished run's log."""
        itl_s, itl_weight = self.times.gaps()
        return RunLog(
            steps=self._columns(),
            requests=self.times.columns(stats),
            itl_s=itl_s,
            itl_weight=itl_weight,
            block_size=self._block_size,
            capacity_slots=capacity_slots,
            kv_bytes_per_token=kv_bytes_per_token,
            span_s=to_s(self._end_ns),
        )

    def _columns(self) -> dict[str, Column]:
        """Columns by name; counts as integers, which float64 held exactly."""
        whole = np.concatenate(self._tables) if self._tables else np.zeros((0, len(COLUMN)))
        return {
            name: whole[:, index].copy() if name in SECONDS else whole[:, index].astype(np.int64)
            for name, index in COLUMN.items()
        }


def digests_differ(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The first step at which two replays decided differently, or None."""
    pairs: Iterable[tuple[str, str]] = zip(one, other, strict=False)
    first = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(one) != len(other):
        return min(len(one), len(other))
    return first
