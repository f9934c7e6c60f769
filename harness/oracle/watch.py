"""Our side: a scheduler that notes its decisions step by step, and the requests as another scheduler gets them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.memory.eviction import LruQueue
from engine.core.memory.paged import PagedManager
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport
from engine.core.scheduling.scheduler import Scheduler
from harness.oracle.decisions import Step
from traces.trace import TraceRequest

_MOST_TOKENS = 1 << 26  # of one segment
WireRequest = Mapping[str, Any]
"""`id`, `prompt` as ranges of token ids (first, count), `output` as one such range, `salt`, `priority`."""


class NotedLru(LruQueue):
    """The least recently used order, which notes what was evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []

    def pop(self, count: int) -> list[int]:
        """Evict `count` blocks."""
        victims = super().pop(count)
        self.evicted += victims
        return victims


class WatchedScheduler(Scheduler):
    """A scheduler that calls `observe(arrived, step)` after each commit, with what was submitted before the step.

    `scheduler` must be new, and its manager must evict by `lru`. Steps must be taken one by one.
    """

    def __init__(
        self, scheduler: Scheduler, lru: NotedLru, observe: Callable[[Sequence[Request], Step], None]
    ) -> None:
        super().__init__(scheduler.manager, scheduler.limits, scheduler.policies)
        assert isinstance(scheduler.manager, PagedManager)
        self._pool = scheduler.manager.pool
        self._lru = lru
        self._observe = observe
        self._arrived: list[Request] = []
        self._ends: dict[int, int] = {}  # context after its row of the last step, by request
        self._blocks: dict[int, int] = {}  # entries of its table that were noted, by request
        self._noted = Step()

    def submit(self, request: Request) -> None:
        """Add a request."""
        super().submit(request)
        self._arrived.append(request)

    def schedule(self, max_steps: int = 1) -> StepPlan:
        """Plan one step, and note it."""
        plan = super().schedule(1)
        self._noted = self._decisions(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> CommitReport:
        """Apply the result, and hand on what was noted."""
        noted = self._noted
        report = super().commit(plan, result)
        for request_id in report.finished:
            self._ends.pop(request_id, None)
            del self._blocks[request_id]
        noted.finished.extend(report.finished)
        arrived, self._arrived = self._arrived, []
        self._observe(arrived, noted)
        return report

    def _decisions(self, plan: StepPlan) -> Step:
        entering = set(plan.admitted)
        for request_id in plan.preempted:
            self._blocks.pop(request_id, None)
        rows, blocks, ends, hits = [], [], dict[int, int](), dict[int, int]()
        for row in plan.rows:
            request_id, context, query = row.request_id, row.context_len, row.query_len
            enters = request_id in entering
            if enters:
                hits[request_id] = context
            if enters or query != 1 or self._ends.get(request_id) != context:
                rows.append((request_id, context, query))
            ends[request_id] = context + query
            known = self._blocks.get(request_id, 0)
            if len(row.table) > known:
                blocks.append((request_id, list(row.table[known:])))
                self._blocks[request_id] = len(row.table)
        paused = {
            group.request.request_id: group.sequences[0].computed
            for group in self.running
            if group.request.request_id not in ends
        }
        self._ends = {**ends, **paused}
        evicted, self._lru.evicted = self._lru.evicted, []
        return Step(
            admitted=[(request_id, hits.get(request_id, 0)) for request_id in plan.admitted],
            preempted=sorted(plan.preempted),
            rows=rows,
            paused=list(paused),
            blocks=blocks,
            evicted=evicted,
            running=plan.running,
            waiting=plan.waiting,
            free=self._pool.free_blocks,
        )


class TokenRanges:
    """Token ids for a trace's requests as ranges: equal keys give equal tokens, and no others are equal."""

    def __init__(self, rows: Sequence[TraceRequest]) -> None:
        self._rows = {row.request_id: row for row in rows}
        self._first: dict[int, int] = {}
        self._ranges = 0

    def wire(self, request: Request) -> WireRequest:
        """The request with its token ids; its generated tokens are its own."""
        row = self._rows[request.request_id]
        return {
            "id": request.request_id,
            "prompt": [self._range(segment.key, segment.tokens) for segment in row.segments],
            "output": self._range(None, request.output_tokens),
            "salt": row.salt,
            "priority": request.priority,
        }

    def _range(self, key: int | None, tokens: int) -> tuple[int, int]:
        if key is not None and key in self._first:
            return self._first[key], tokens
        first = self._ranges * _MOST_TOKENS
        self._ranges += 1
        if key is not None:
            self._first[key] = first
        return first, tokens
