"""Steps, requests and gaps folded into running totals as they come, in constant memory.

Chunks end at fixed numbers of steps and requests, so that no sum depends on how a replay handed them over.
"""

from collections.abc import Mapping

import numpy as np

from harness.metrics.compute import figures
from harness.metrics.log import Column, FloatArray, Outcome
from harness.metrics.totals import RunningTotals, Totals
from harness.sim.hull import ExtrapolatedSteps, Hull

CHUNK = 4096  # steps, and requests, folded at a time


class RunFold:
    """The totals of one run; `hull` is what its cost model was measured on."""

    def __init__(self, hull: Hull) -> None:
        self._running = RunningTotals()
        self._left: dict[str, Column] = {}  # steps that do not fill a chunk yet
        self._outcome = dict.fromkeys(Outcome, 0)
        self.extrapolated = ExtrapolatedSteps(hull)

    def add_steps(self, fresh: Mapping[str, Column]) -> None:
        """The next steps, columns as in `RunLog.steps`; they are folded in whole chunks."""
        steps = {name: np.concatenate([self._left.get(name, fresh[name][:0]), fresh[name]]) for name in fresh}
        whole = len(steps["step"]) // CHUNK * CHUNK
        for start in range(0, whole, CHUNK):
            self._fold({name: column[start : start + CHUNK] for name, column in steps.items()})
        self._left = {name: column[whole:] for name, column in steps.items()}

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """Gaps between tokens, each standing for so many."""
        self._running.add_gaps(seconds, weights)

    def add_requests(self, table: Mapping[str, Column]) -> None:
        """The next CHUNK requests that ended, or the last ones; columns as in `RunLog.requests`."""
        self._running.add_requests(table)
        for outcome in Outcome:
            self._outcome[outcome] += int((table["outcome"] == outcome).sum())

    def close(self) -> None:
        """No step follows: fold those that fill no chunk."""
        if self._left:
            self._fold(self._left)

    def _fold(self, steps: Mapping[str, Column]) -> None:
        self._running.add_steps(steps)
        self.extrapolated.add(steps)

    def metrics(self, span_s: float, capacity_slots: int, kv_bytes_per_token: int) -> dict[str, float]:
        """Metrics as `compute_metrics` gives them of a log; quantiles within 0.1 %."""
        running = self._running
        return figures(running.totals, running.samples, span_s, capacity_slots, kv_bytes_per_token)

    @property
    def totals(self) -> Totals:
        """Sums over the run."""
        return self._running.totals

    @property
    def outcome(self) -> dict[str, int]:
        """Requests by outcome."""
        return {outcome.name.lower(): count for outcome, count in self._outcome.items()}
