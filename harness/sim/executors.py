"""The two sources of time that need no torch: a cost model, and a recording of an earlier run."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Decoding, Request
from harness.sim.clock import to_ns
from harness.sim.cost import CostModel
from harness.sim.features import FeatureMeter
from harness.sim.genealogy import BeamGenealogy

_FIRST_LOOK = 48  # steps of a fast-forward that are priced before looking whether a request arrives earlier


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long the steps of a plan took, one entry a step: whole ns, attention seconds; phases in seconds if known."""

    ns: list[int]
    attention_s: list[float]
    phases: Mapping[str, float] = field(default_factory=dict)


class Executor(Protocol):
    """Runs or prices plans. `begin` … `end` enclose the whole step, from `schedule()` to the end of `commit()`."""

    max_repeat: int

    def begin(self) -> None:
        """A step begins: the scheduler is called next."""
        ...

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan. Steps that start `horizon_ns` or more from now must not be taken: a request arrives then."""
        ...

    def end(self) -> StepTiming:
        """The step is committed: how long it took."""
        ...


class SimulatedExecutor:
    """Seconds from a cost model, beams from a genealogy model."""

    def __init__(
        self,
        cost: CostModel,
        requests: Mapping[int, Request],
        block_size: int,
        genealogy: BeamGenealogy,
        *,
        fast_forward: bool = True,
    ) -> None:
        self.max_repeat = 1 << 30 if fast_forward else 1
        self._cost = cost
        self._requests = requests
        self._meter = FeatureMeter(requests, block_size)
        self._genealogy = genealogy
        self._generated: dict[int, int] = {}
        self._timing = StepTiming([], [])

    def begin(self) -> None:
        """Nothing to start: no clock runs."""

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Price as many of the plan's steps as start before the horizon."""
        steps = min(plan.repeat, _FIRST_LOOK) if horizon_ns is not None else plan.repeat
        ns, attention = self._price(plan, steps)
        if horizon_ns is not None and steps < plan.repeat and sum(ns) < horizon_ns:
            ns, attention = self._price(plan, plan.repeat)
        if horizon_ns is not None and len(ns) > 1:
            taken = 1 + bisect_left(list(accumulate(ns[:-1])), horizon_ns)
            ns, attention = ns[:taken], attention[:taken]
        self._meter.took(plan, len(ns))
        self._timing = StepTiming(ns, attention)
        return StepResult(repeat=len(ns), parents=self._parents(plan))

    def end(self) -> StepTiming:
        """The prices of the steps taken."""
        return self._timing

    def _price(self, plan: StepPlan, steps: int) -> tuple[list[int], list[float]]:
        price = self._cost.price(self._meter.features(plan, steps))
        if steps == 1:
            return [max(1, to_ns(float(price.seconds)))], [float(price.attention_s)]
        ns = np.maximum(1, to_ns(np.broadcast_to(price.seconds, steps)))
        return ns.tolist(), np.broadcast_to(price.attention_s, steps).tolist()

    def _parents(self, plan: StepPlan) -> dict[int, list[int]]:
        parents: dict[int, list[int]] = {}
        for row in plan.rows:
            request = self._requests[row.request_id]
            if not row.samples or request.decoding is not Decoding.BEAM or row.request_id in parents:
                continue
            generated = self._generated.get(row.request_id, 0)
            self._generated[row.request_id] = generated + 1
            fresh = self._genealogy.parents(row.request_id, generated, request.width)
            parents[row.request_id] = fresh if generated else [0] * request.width
        return parents


class RecordingEndedError(RuntimeError):
    """A played-back run has more steps than were recorded: the two sides decided differently."""


class RecordedExecutor:
    """Plays a run back: its step durations and its beams' parents. Any plan that differs then is a bug."""

    max_repeat = 1

    def __init__(self, ns: Sequence[int], parents: Sequence[Mapping[int, Sequence[int]]]) -> None:
        self._ns = ns
        self._parents = parents
        self._step = -1

    def begin(self) -> None:
        """The next recorded step. Raises RecordingEndedError when the replay has more steps than the recording."""
        self._step += 1
        if self._step >= len(self._ns):
            raise RecordingEndedError(f"the recording has {len(self._ns)} steps, the replay goes on")

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """The recorded parents."""
        return StepResult(parents=self._parents[self._step])

    def end(self) -> StepTiming:
        """The recorded duration."""
        return StepTiming([self._ns[self._step]], [np.nan])
