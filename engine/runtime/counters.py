"""Running totals of an engine, for whoever watches it."""

from collections import Counter
from dataclasses import dataclass, field

from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import StepPlan
from engine.runtime.outputs import RequestMetrics, RequestOutput


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start; `running`, `waiting` and `usage` are those of the last step."""

    steps: int = 0
    prompt_tokens: int = 0  # of prompts that are computed
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0
    resumed_hits: int = 0  # found again after a preemption
    preemptions: int = 0
    swaps: int = 0  # preemptions that saved the blocks in host memory, of requests that are over
    copies: int = 0
    running: int = 0
    waiting: int = 0
    usage: float = 0.0  # share of the pool's slots whose blocks are referred to
    finished: Counter[str] = field(default_factory=Counter)  # by reason

    def note_step(self, plan: StepPlan, report: CommitReport) -> None:
        """Count a step that has been committed."""
        self.steps += 1
        self.preemptions += len(plan.preempted)
        self.copies += len(plan.copies)
        self.running, self.waiting = plan.running - len(report.finished), plan.waiting
        use = plan.usage
        held = use.token + use.reserved + use.internal if self.running else 0
        self.usage = held / max(1, use.capacity)

    def note_tokens(self, metrics: RequestMetrics, sequences: int) -> None:
        """A request got tokens for so many sequences; with the first ones its prompt is done."""
        self.generation_tokens += sequences
        if not metrics.steps:
            self.prompt_tokens += metrics.prompt_tokens

    def note_request(self, output: RequestOutput, stats: RequestStats | None) -> None:
        """Count a request that is over."""
        metrics = output.metrics
        if metrics.scheduled_s is not None:
            self.prefix_queries += metrics.prompt_tokens
            self.prefix_hits += metrics.cached_tokens
        if stats is not None:
            self.resumed_hits += stats.resumed_hit_tokens
            self.swaps += stats.swaps
        reasons = [one.finish_reason for one in output.outputs] or ["error" if output.error else "abort"]
        self.finished[str(reasons[0])] += 1
