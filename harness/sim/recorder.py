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
        self._singles: list[tuple[float, ...]] = []
        self._step = 0
        self._end_ns = 0
        self._keep_plans = keep_plans
        self.digests: list[str] = []
        self.parents: list[Mapping[int, Sequence[int]]] = []
        self.step_ns: list[int] = []
        self._features: list[list[float]] = []

    @property
    def features(self) -> FloatArray:
        """Features of every step, `[steps, len(FEATURES)]`; with `keep_plans` only."""
        return np.array(self._features, dtype=np.float64).reshape(-1, len(FEATURES))

    def record(
        self, now_ns: int, plan: StepPlan, result: StepResult, report: CommitReport, timing: StepTiming
    ) -> None:
        """One plan, taken `result.repeat` times, from `now_ns` on."""
        ends = now_ns + np.cumsum(timing.ns)
        starts = ends - timing.ns
        self._singles.append(self._row(plan, timing, int(starts[0])))
        if report.leap is not None:
            self._leap(plan, timing, starts, report.leap)
        self.times.step(plan, report, starts, ends)
        self._step += result.repeat
        self._end_ns = int(ends[-1])
        if self._keep_plans:
            self.digests.append(plan.digest())
            self.parents.append(result.parents)
            self.step_ns.append(int(timing.ns[0]))
            self._features.append(step_features(plan, self._requests, self._block_size))

    def _row(self, plan: StepPlan, timing: StepTiming, start_ns: int) -> tuple[float, ...]:
        """One step in the order of STEP_COLUMNS; of a fast-forward, the first."""
        rows, usage, phases = plan.rows, plan.usage, timing.phases
        tokens = sum(row.query_len for row in rows)
        decode = sum(row.query_len == 1 for row in rows)
        return (
            self._step,
            to_s(start_ns),
            to_s(int(timing.ns[0])),
            float(timing.attention_s[0]),
            *(phases.get(phase, np.nan) for phase in PHASES),
            len(rows),
            decode,
            tokens - decode,
            tokens,
            sum(row.context_len for row in rows) + tokens,
            sum(row.samples for row in rows),
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
            usage.reserved,
            usage.internal,
            usage.external,
            usage.free,
            usage.logical_blocks,
            usage.physical_blocks,
        )

    def _leap(self, plan: StepPlan, timing: StepTiming, starts: NsArray, leap: LeapColumns) -> None:
        """The further steps of a fast-forward: as the first, but for time, context and the blocks taken."""
        self._flush()
        steps = len(timing.ns) - 1
        table = np.tile(self._tables[-1][-1], (steps, 1))
        later = np.arange(1, steps + 1)
        for name in FIRST_ONLY:
            table[:, COLUMN[name]] = 0
        for name in LEAPING:
            table[:, COLUMN[name]] = getattr(leap, name)
        table[:, COLUMN["step"]] += later
        table[:, COLUMN["start_s"]] = to_s(starts[1:])
        table[:, COLUMN["seconds"]] = to_s(timing.ns[1:])
        table[:, COLUMN["attention_s"]] = timing.attention_s[1:]
        table[:, COLUMN["kv_read_tokens"]] += len(plan.rows) * later
        table[:, COLUMN["token"]] += len(plan.rows) * later
        others = table[:, [COLUMN[name] for name in ("token", "cached", "internal", "external", "free")]]
        table[:, COLUMN["reserved"]] = plan.usage.capacity - others.sum(axis=1)
        self._tables.append(table)

    def _flush(self) -> None:
        """Turn the single steps gathered so far into a table."""
        if self._singles:
            self._tables.append(np.array(self._singles, dtype=np.float64))
            self._singles = []

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
        self._flush()
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
