"""A recorder that keeps no rows: what a replay leaves behind is folded as it runs."""

from collections.abc import Mapping

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from harness.sim.executors import StepTiming
from harness.sim.folding import CHUNK, RunFold
from harness.sim.hull import Hull
from harness.sim.recorder import Recorder


class StreamingRecorder(Recorder):
    """Hands steps, gaps and requests to `fold` a chunk at a time, and forgets them."""

    def __init__(self, requests: Mapping[int, Request], block_size: int, hull: Hull) -> None:
        super().__init__(requests, block_size)
        self.fold = RunFold(hull)

    def record(
        self,
        now_ns: int,
        plan: StepPlan,
        result: StepResult,
        report: CommitReport,
        timing: StepTiming,
        stats: Mapping[int, RequestStats],
    ) -> int:
        """One plan; returns how long it took, in ns."""
        took_ns = super().record(now_ns, plan, result, report, timing, stats)
        if self._steps.pending >= CHUNK:
            self._hand_over()
        while self._times.ended >= CHUNK:
            self.fold.add_requests(self._times.drain(CHUNK))
        return took_ns

    def _hand_over(self) -> None:
        self.fold.add_steps(self._steps.drain())
        self.fold.add_gaps(*self._times.drain_gaps())

    def finish(self, stats: Mapping[int, RequestStats]) -> None:
        """The replay is over: hand over what is left."""
        self._times.close(stats)
        self._hand_over()
        self.fold.close()
        while self._times.ended:
            self.fold.add_requests(self._times.drain(CHUNK))

    @property
    def span_s(self) -> float:
        """When the last step ended, in seconds."""
        return self._steps.end_s
