"""The protocol of executors, and the two that need no torch: with a cost model, or with a recording of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.core.options import Decoding
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from harness.replay.arrivals import LATEST_NS, NS_PER_S, TimeSpanError, to_ns
from harness.replay.beams import Genealogy
from harness.replay.branches import BranchEnds, BranchSurvival, DraftAcceptance
from harness.replay.cost_model import Amount, CostModel
from harness.replay.features import FastForwardFeatures, FeatureMeter, Sight, StepFeatures

_ONE_BY_ONE = 10  # further steps of a fast-forward up to which single numbers are quicker than arrays
_NO_PHASES: Mapping[str, float] = MappingProxyType({})
_NOTHING: Mapping[int, Any] = MappingProxyType({})


class StepTiming(NamedTuple):
    """Durations of the steps of a plan, one entry per step: whole ns, attention seconds; phases in s where known.

    `features` are those of the plan's first step.
    """

    ns: list[int]
    attention_s: list[float]
    features: StepFeatures[Amount]
    phases: Mapping[str, float] = _NO_PHASES


class Executor(Protocol):
    """Runs or prices step plans.

    For each step the replay calls `begin()`, `Scheduler.schedule()`, `execute()`, `Scheduler.commit()` and `end()`, so
    that `begin()` to `end()` is the duration of the whole step. An executor with a clock leaves `unclocked()` out.
    """

    max_steps: int

    def begin(self) -> None:
        """A step begins: the scheduler is called next."""

    def unclocked(self, look: Callable[[], None]) -> None:
        """Somebody looks at the step before it is executed: call `look`."""
        look()

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan. It must not run steps that start `horizon_ns` or more from now: a request arrives then."""

    def end(self) -> StepTiming:
        """The step is committed: how long it took."""


class SimulatedExecutor(Executor):
    """The executor of a prediction: seconds come from a cost model, beam parents from a genealogy model.

    `requests` by id may grow while the replay runs. `survival` lets branches of sampled requests end before their
    pinned length; their ends are drawn step by step, so there is no fast-forward. `acceptance` draws the accepted
    drafts (None: all are rejected). `window` is that of the model's windowed layers, `page_slots` as in `FeatureMeter`.
    """

    def __init__(
        self,
        cost: CostModel,
        requests: Mapping[int, Request],
        block_size: int,
        genealogy: Genealogy,
        *,
        fast_forward: bool = True,
        survival: BranchSurvival | None = None,
        acceptance: DraftAcceptance | None = None,
        window: Sight | None = None,
        page_slots: Callable[[Sequence[int]], float] | None = None,
    ) -> None:
        self.max_steps = 1 << 30 if fast_forward and survival is None else 1
        self._ends = BranchEnds(survival, requests) if survival else None
        self._acceptance = acceptance
        self._cost = cost
        self._block_size = block_size
        self._window = window
        self._meter = FeatureMeter(requests, block_size, window, page_slots)
        self._parents = SimulatedParents(requests, genealogy)
        self._timing: StepTiming

    def begin(self) -> None:
        """Does nothing: no clock runs."""

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Price the plan's steps that start before the horizon."""
        accepted = self._acceptance.of(plan) if self._acceptance else _NOTHING
        features = self._meter.first(plan, accepted)
        ns, attention = self._prices(plan, features, horizon_ns)
        self._meter.took(features, len(ns))
        self._timing = StepTiming(ns, attention, features)
        return StepResult(
            num_steps=len(ns),
            parents=self._parents.of(plan),
            ended=self._ends.of(plan) if self._ends else _NOTHING,
            accepted=accepted,
        )

    def end(self) -> StepTiming:
        """The prices of the steps taken."""
        return self._timing

    def _prices(
        self, plan: StepPlan, first: Sequence[Amount], horizon_ns: int | None
    ) -> tuple[list[int], list[float]]:
        """Nanoseconds and attention seconds of the steps that start before the horizon, priced in at most two rounds.

        The first round prices as many steps as fit if all took as long as the first one; the second round prices all.
        """
        seconds, attention_s = self._cost.price(first)
        if plan.loads.blocks:
            read_s = plan.loads.seconds
            seconds = max(float(seconds), read_s) if plan.loads.overlaps else seconds + read_s
        ns, attention = [_whole_ns(float(seconds))], [float(attention_s)]
        left = plan.num_steps - 1
        if not left or (horizon_ns is not None and ns[0] >= horizon_ns):
            return ns, attention
        if horizon_ns is not None:
            left = min(left, -(-horizon_ns // ns[0]) + 1)
        ahead = FastForwardFeatures(plan, first, self._block_size, self._window)
        more = self._singly if left <= _ONE_BY_ONE else self._together
        ns, attention = more(ahead, left + 1, ns, attention)
        if horizon_ns is None:
            return ns, attention
        if left + 1 < plan.num_steps and sum(ns) < horizon_ns:  # steps got shorter on the way
            ns, attention = self._together(ahead, plan.num_steps, ns[:1], attention[:1])
        taken = _begun_before(ns, horizon_ns)
        return ns[:taken], attention[:taken]

    def _singly(
        self, ahead: FastForwardFeatures, steps: int, ns: list[int], attention: list[float]
    ) -> tuple[list[int], list[float]]:
        price = self._cost.price
        for features in ahead.singles(steps):
            seconds, attention_s = price(features)
            ns.append(_whole_ns(float(seconds)))
            attention.append(float(attention_s))
        return ns, attention

    def _together(
        self, ahead: FastForwardFeatures, steps: int, ns: list[int], attention: list[float]
    ) -> tuple[list[int], list[float]]:
        seconds, attention_s = self._cost.price(ahead.columns(steps))
        if np.max(seconds) * NS_PER_S > LATEST_NS:
            raise TimeSpanError
        whole = np.maximum(1, to_ns(np.broadcast_to(seconds, steps)))
        return whole.tolist(), np.broadcast_to(attention_s, steps).tolist()


def _whole_ns(seconds: float) -> int:
    return round(seconds * NS_PER_S) or 1


def _begun_before(ns: Sequence[int], horizon_ns: int) -> int:
    """The number of steps that start before the horizon; the first always counts."""
    end = 0
    for taken, step_ns in enumerate(ns):
        if end >= horizon_ns and taken:
            return taken
        end += step_ns
    return len(ns)


class SimulatedParents:
    """Beam parents of a step, drawn from a genealogy model."""

    def __init__(self, requests: Mapping[int, Request], genealogy: Genealogy) -> None:
        self._requests = requests
        self._genealogy = genealogy
        self._generated: dict[int, int] = {}  # tokens chosen, by id of the beam requests admitted so far

    def of(self, plan: StepPlan) -> dict[int, list[int]]:
        """Parents of the beam requests that sample in this plan."""
        for request_id in plan.admitted:
            if self._requests[request_id].decoding is Decoding.beam:
                self._generated.setdefault(request_id, 0)
        if not self._generated:
            return {}
        sampling = dict.fromkeys(row.request_id for row in plan.other_rows if row.samples)
        return {rid: self._draw(rid) for rid in sampling if rid in self._generated}

    def _draw(self, request_id: int) -> list[int]:
        generated, width = self._generated[request_id], self._requests[request_id].width
        self._generated[request_id] = generated + 1
        return self._genealogy.parents(request_id, generated, width) if generated else [0] * width


class RecordingEndedError(RuntimeError):
    """The replay of a recording has more steps than were recorded: the two sides decided differently."""


class RecordedExecutor(Executor):
    """Replays a recorded run: its step durations and the engine's step results. A step plan that differs is a bug."""

    max_steps = 1

    def __init__(self, ns: Sequence[int], results: Sequence[StepResult], meter: FeatureMeter) -> None:
        self._ns = ns
        self._results = results
        self._meter = meter
        self._step = -1
        self._plan: StepPlan

    def begin(self) -> None:
        """Go to the next recorded step.

        Raises:
            RecordingEndedError: the replay has more steps than the recording.
        """
        self._step += 1
        if self._step >= len(self._ns):
            raise RecordingEndedError(f"the recording has {len(self._ns)} steps, the replay goes on")

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """The recorded result: parents, ends, accepted drafts."""
        self._plan = plan
        return self._results[self._step]

    def end(self) -> StepTiming:
        """The recorded duration."""
        features = self._meter.single(self._plan, self._results[self._step].accepted)
        return StepTiming([self._ns[self._step]], [np.nan], features)


class AroundEngine(Executor):
    """An executor that hands all on to `engine`; its subclasses change what is told of a step."""

    max_steps = 1

    def __init__(self, engine: Executor) -> None:
        self._engine = engine

    def begin(self) -> None:
        """A step begins."""
        self._engine.begin()

    def unclocked(self, look: Callable[[], None]) -> None:
        """Call `look`, outside of the engine's time."""
        self._engine.unclocked(look)

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan."""
        return self._engine.execute(plan, horizon_ns)

    def end(self) -> StepTiming:
        """The engine's time."""
        return self._engine.end()


class PinnedEnds(AroundEngine):
    """An executor around `engine` that ends sampled branches where the draws say, whatever tokens they choose."""

    def __init__(self, engine: Executor, survival: BranchSurvival, requests: Mapping[int, Request]) -> None:
        super().__init__(engine)
        self._ends = BranchEnds(survival, requests)

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan, and end branches with it."""
        return replace(self._engine.execute(plan, horizon_ns), ended=self._ends.of(plan))
