"""Continuous batching: which rows run in the next step.

One loop without phases, after vLLM's v1 scheduler: each request's computed tokens chase its known tokens under a token
budget. Running requests come first, in order of admission; when blocks run out the youngest is preempted and will be
recomputed; waiting requests are admitted first come, first served, only if nothing was preempted in this step.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from engine.core.errors import CoreError, NeverFitsError
from engine.core.limits import SchedulerLimits
from engine.core.manager import KVCacheManager
from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import Row, StepPlan, StepResult
from engine.core.request import Request
from engine.core.rows import rows_of
from engine.core.sequence import Group


@dataclass(slots=True)
class _StepBuilder:
    """What the step under way holds so far."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    new_blocks: int = 0
    hit_tokens: int = 0


class Scheduler:
    """Plans steps over one KV cache manager. Alternate `schedule()` and `commit()`."""

    def __init__(self, manager: KVCacheManager, limits: SchedulerLimits) -> None:
        self.manager = manager
        self.limits = limits
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.stats: dict[int, RequestStats] = {}
        self._spare_blocks = int(limits.watermark * manager.num_blocks)
        self._step = 0
        self._sequences = 0  # branches of running requests, counted at full width

    @property
    def has_work(self) -> bool:
        """Whether a step can be scheduled."""
        return bool(self.running or self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises NeverFitsError, with the reason, if no schedule could ever serve it."""
        reason = self.never_fits(request)
        if reason:
            raise NeverFitsError(f"request {request.request_id} can never be served: it {reason}")
        if request.request_id in self.stats:
            raise CoreError(f"request {request.request_id} was submitted before")
        self.stats[request.request_id] = RequestStats()
        self.waiting.append(Group.of(request))

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None."""
        limits, total = self.limits, request.prompt_tokens + request.output_tokens
        if limits.max_model_len is not None and total > limits.max_model_len:
            return f"has {total} tokens in all, the longest served is {limits.max_model_len}"
        if request.width > min(limits.max_running, limits.max_batched_tokens):
            return f"has {request.width} sequences, a step takes {min(limits.max_running, limits.max_batched_tokens)}"
        if not limits.chunked_prefill and request.final_kv_tokens > limits.max_batched_tokens:
            return f"may prefill {request.final_kv_tokens} tokens at once, a step takes {limits.max_batched_tokens}"
        return self.manager.never_fits(request)

    # -- a step --------------------------------------------------------------------------------------------

    def schedule(self, max_repeat: int = 1) -> StepPlan:
        """The next step. With `max_repeat` above 1 the plan says how many identical steps may follow at once."""
        if not self.has_work:
            raise CoreError("nothing is running or waiting: there is no step to schedule")
        step = _StepBuilder(self.limits.max_batched_tokens)
        self._continue_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        plan = self._plan(step, max_repeat)
        self._step += 1
        return plan

    def _continue_running(self, step: _StepBuilder) -> None:
        index = 0
        while index < len(self.running) and step.budget:
            group = self.running[index]
            group.rows = rows_of(group, step.budget)
            while group.rows and not self.manager.can_extend(group.rows):
                victim = self._preempt_youngest()
                step.preempted.append(victim.request.request_id)
                if victim is group:
                    return
            self._extend(group, step)
            index += 1
        for group in self.running[index:]:
            group.rows = []

    def _preempt_youngest(self) -> Group:
        victim = self.running.pop()
        for sequence in reversed(victim.sequences):
            self.manager.release(sequence)
        victim.restart()
        self.stats[victim.request.request_id].preemptions += 1
        self._sequences -= victim.request.width
        self.waiting.appendleft(victim)
        return victim

    def _admit_waiting(self, step: _StepBuilder) -> None:
        """First come, first served: the first request that does not fit ends the loop."""
        while self.waiting and step.budget:
            group = self.waiting[0]
            hits = self.manager.lookup(group)
            cached = len(hits) * self.manager.block_size
            if not self._fits_batch(group, cached, step.budget):
                return
            if not self.manager.can_admit(group, hits, self._spare_blocks if self.running else 0):
                return
            self.waiting.popleft()
            self.manager.admit(group, hits)
            self._note_hits(group, cached)
            step.hit_tokens += cached
            step.admitted.append(group.request.request_id)
            self.running.append(group)
            self._sequences += group.request.width
            group.rows = rows_of(group, step.budget)
            self._extend(group, step)

    def _fits_batch(self, group: Group, cached: int, budget: int) -> bool:
        """Whether the batch has places for every branch, and, without chunking, the budget for the whole prompt."""
        if self._sequences + group.request.width > self.limits.max_running:
            return False
        return self.limits.chunked_prefill or group.root_target - cached <= budget

    def _note_hits(self, group: Group, cached: int) -> None:
        stats = self.stats[group.request.request_id]
        if stats.preemptions:
            stats.resumed_hit_tokens += cached
            stats.recomputed_tokens += max(0, group.lost - cached)
        else:
            stats.hit_tokens += cached

    def _extend(self, group: Group, step: _StepBuilder) -> None:
        request = group.request
        for row in group.rows:
            sequence, context = row.sequence, row.sequence.computed
            step.new_blocks += self.manager.extend(row)
            step.budget -= row.query_len
            step.rows.append(
                Row(request.request_id, sequence.branch, context, row.query_len, row.samples, sequence.table)
            )

    def _plan(self, step: _StepBuilder, max_repeat: int) -> StepPlan:
        return StepPlan(
            step=self._step,
            rows=step.rows,
            copies=self.manager.drain_copies(),
            frees=self.manager.drain_frees(),
            repeat=self._repeat(step, max_repeat) if max_repeat > 1 else 1,
            admitted=step.admitted,
            preempted=step.preempted,
            new_blocks=step.new_blocks,
            hit_tokens=step.hit_tokens,
            running=len(self.running),
            waiting=len(self.waiting),
            usage=self.manager.usage(self.waiting[0].request if self.waiting else None),
        )

    def _repeat(self, step: _StepBuilder, max_repeat: int) -> int:
        """How many steps in a row are the same but for one token more per row.

        All running sequences decode, and nothing can change until one finishes, a block is short, or a request
        arrives (the caller cuts there). A waiting request that was refused now is refused until then: free blocks
        only get fewer, and no block that it could hit is made by decoding.
        """
        if step.admitted or step.preempted or len(step.rows) != self._sequences:
            return 1
        if not all(row.samples and row.query_len == 1 for row in step.rows):
            return 1
        if any(group.request.width > 1 for group in self.running):
            return 1
        steps = min(max_repeat, *(group.remaining for group in self.running))
        if steps == 1:
            return 1
        context = np.array([row.context_len for row in step.rows], dtype=np.int64)
        return self.manager.leap_limit(context, steps)

    # -- its outcome ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> CommitReport:
        """Take the executor's answer to the last plan into the books."""
        if not 1 <= result.repeat <= plan.repeat:
            raise CoreError(f"step {plan.step}: {result.repeat} steps taken, 1 to {plan.repeat} were planned")
        report = CommitReport()
        if result.repeat > 1:
            sequences = [group.sequences[0] for group in self.running]
            report.leap = self.manager.leap(sequences, result.repeat)
        for group in self.running:
            if group.rows:
                self._advance(group, result, report)
        if report.finished:
            done = set(report.finished)
            self.running = [group for group in self.running if group.request.request_id not in done]
        return report

    def _advance(self, group: Group, result: StepResult, report: CommitReport) -> None:
        request_id, repeat = group.request.request_id, result.repeat
        for row in group.rows:
            row.sequence.computed += row.query_len + repeat - 1
        sampled = group.rows[0].samples
        group.rows = []
        if sampled:
            group.generated += repeat
            report.emitted.append(request_id)
        if sampled and (not group.remaining or request_id in result.finished):
            self._finish(group, report)
        elif not group.forked:
            self._fork_if_ready(group)
        elif sampled and group.is_beam:
            self.manager.reparent(group.sequences, result.parents[request_id])

    def _fork_if_ready(self, group: Group) -> None:
        root = group.sequences[0]
        if group.request.width > 1 and root.computed == group.request.prompt_tokens:
            self.manager.fork(root, group.fork())

    def _finish(self, group: Group, report: CommitReport) -> None:
        for sequence in group.sequences:
            self.manager.release(sequence)
        self._sequences -= group.request.width
        report.finished.append(group.request.request_id)
