"""Running totals of an engine, for whoever watches it."""

from collections import Counter
from dataclasses import dataclass, field

from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import StepPlan
from engine.runtime.outputs import RequestOutput


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start; `running`, `waiting` and `usage` are those of the last step."""

    steps: int = 0
    prompt_tokens: int = 0  # of finished requests, like the next
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0
    resumed_hits: int = 0  # found again after a preemption
    preemptions: int = 0
    copies: int = 0
    running: int = 0
    waiting: int = 0
    usage: float = 0.0  # share of the pool's slots whose blocks are referred to
    finished: Counter[str] = field(default_factory=Counter)  # by reason

    def note_step(self, plan: StepPlan, report: CommitReport) -> None:
        """Count a step."""
        self.steps += 1
        self.preemptions += len(plan.preempted)
        self.copies += len(plan.copies)
        self.running, self.waiting = plan.running - len(report.finished), plan.waiting
        use = plan.usage
        self.usage = (use.token + use.reserved + use.internal) / max(1, use.capacity)

    def note_request(self, output: RequestOutput, stats: RequestStats | None) -> None:
        """Count a request that is over."""
        metrics = output.metrics
        self.prompt_tokens += metrics.prompt_tokens
        self.generation_tokens += metrics.output_tokens
        if metrics.scheduled_s is not None:
            self.prefix_queries += metrics.prompt_tokens
            self.prefix_hits += metrics.cached_tokens
        if stats is not None:
            self.resumed_hits += stats.resumed_hit_tokens
        reasons = [one.finish_reason for one in output.outputs] or ["error" if output.error else "abort"]
        self.finished[str(reasons[0])] += 1
