"""What only an engine finds out: drawn from models, recorded, or, for ends of branches, pinned alike on both sides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from harness.config.schema import RunConfig
from harness.point.parents import recorded_parents
from harness.sim.branches import BranchEnds, BranchSurvival, DraftAcceptance
from harness.sim.cost import CostModel, CostSource
from harness.sim.executors import Executor, SimulatedExecutor, StepTiming
from harness.sim.genealogy import BeamGenealogy, Genealogy, RecordedGenealogy

if TYPE_CHECKING:
    from harness.point.workload import Workload


@dataclass(frozen=True)
class Chance:
    """How beams descend, branches end and drafts fare, where no engine says so.

    `hazard` is the chance that a sampled branch ends after a token: lengths of branches are drawn once, from `seed`,
    and hold on both sides, as the trace's output lengths do. `acceptance` None takes the calibrated share.
    """

    parents: RecordedGenealogy | None = None  # replayed instead of drawn
    hazard: float = 0.0
    acceptance: float | None = None
    seed: int = 0

    @property
    def survival(self) -> BranchSurvival | None:
        """How long sampled branches last; None: as long as the trace says."""
        return BranchSurvival(self.hazard, self.seed) if self.hazard else None

    def genealogy(self, source: CostSource, width: int, churn: float | None) -> Genealogy:
        """The recorded parents, else draws by the given churn, else by the calibrated one."""
        known = source.beam_churn if churn is None else {width: churn}
        return self.parents or BeamGenealogy(known, evenness=source.beam_evenness)

    def accepted(self, source: CostSource) -> DraftAcceptance | None:
        """The given share of draft tokens, else the calibrated one; None where neither is known: all are rejected."""
        share = source.draft_acceptance if self.acceptance is None else self.acceptance
        return None if share is None else DraftAcceptance(share, self.seed)


def chance_of(config: RunConfig) -> Chance:
    """As the configuration says, recorded beams apart."""
    decoding = config.decoding
    return Chance(None, decoding.branch_hazard, decoding.acceptance, config.workload.seed)


def with_recorded_beams(config: RunConfig, workload: "Workload") -> "Workload":
    """The workload whose beams are replayed where the configuration names a recording; raises ConfigError."""
    path = config.decoding.beam_parents
    if path is None:
        return workload
    parents = recorded_parents(path, workload.trace, workload.forms)
    return replace(workload, chance=replace(workload.chance, parents=parents))


def simulated_executor(
    workload: "Workload",
    cost: CostModel,
    requests: Mapping[int, Request],
    beam_churn: float | None,
    *,
    fast_forward: bool,
) -> SimulatedExecutor:
    """Seconds from `cost`, and everything else from the workload's chance; `requests` may grow during the replay."""
    chance = workload.chance
    return SimulatedExecutor(
        cost,
        requests,
        workload.pool.block_size,
        chance.genealogy(cost.source, workload.width, beam_churn),
        fast_forward=fast_forward,
        survival=chance.survival,
        acceptance=chance.accepted(cost.source),
    )


class PinnedEnds:
    """An engine whose sampled branches end where the chance says, whatever tokens they choose."""

    max_repeat = 1

    def __init__(self, engine: Executor, ends: BranchEnds) -> None:
        self._engine = engine
        self._ends = ends

    def begin(self) -> None:
        """A step begins."""
        self._engine.begin()

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan, and end branches with it."""
        return replace(self._engine.execute(plan, horizon_ns), ended=self._ends.of(plan))

    def end(self) -> StepTiming:
        """The engine's time."""
        return self._engine.end()


def with_ends(workload: "Workload", engine: Executor, requests: Mapping[int, Request]) -> Executor:
    """The engine, its branches ending as the workload's chance says."""
    survival = workload.chance.survival
    return PinnedEnds(engine, BranchEnds(survival, requests)) if survival else engine
