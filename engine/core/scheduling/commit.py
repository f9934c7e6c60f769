"""The commit of a step: apply the executor's result to the groups, and release those that have finished.

In vLLM this is `Scheduler.update_from_output`. `CommitReport` says which requests got tokens or ended, `RequestStats`
counts what has happened to one request so far.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.errors import CoreError
from engine.core.memory.manager import FastForwardColumns, KVCacheManager, check_parents
from engine.core.options import SchedulerLimits
from engine.core.plan import StepPlan, StepResult
from engine.core.scheduling.batch import RunningBatch
from engine.core.sequence import Group


@dataclass(slots=True)
class RequestStats:
    """Counters of one request, in tokens unless noted. Cache hits after a preemption are counted separately."""

    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0  # times
    swaps: int = 0  # preemptions that saved the blocks in host memory
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class CommitReport:
    """The outcome of a step: `emitted` are the requests whose branches each got a token, `finished` those that ended.

    The first `len(plan.steady_ids)` entries of `emitted` are the plan's steady requests. `stats` has the counters of
    the requests in `finished`; the scheduler does not keep them.
    """

    emitted: Sequence[int] = ()
    finished: list[int] = field(default_factory=list)
    fast_forward: FastForwardColumns | None = None  # the pool in the steps after the first of a fast-forward
    tokens: Mapping[int, int] = field(default_factory=dict)  # by request, if more than one token per branch
    stats: dict[int, RequestStats] = field(default_factory=dict)


class Commit:
    """Applies step results to the running groups.

    It advances them, forks and re-parents branches, verifies draft tokens, and releases what has ended. With `static`,
    ended requests keep their memory until the whole batch has ended; where they are held, until `release_ended`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        batch: RunningBatch,
        groups: dict[int, Group],
        stats: dict[int, RequestStats],
        limits: SchedulerLimits,
    ) -> None:
        self._manager = manager
        self._batch = batch
        self._groups = groups
        self._stats = stats
        self._static = limits.static_batch
        self._holds = limits.ahead
        self.held: list[Group] = []  # of a static batch: what has ended before its end

    def apply(self, plan: StepPlan, result: StepResult) -> CommitReport:
        """Apply the result of the last plan. Raises CoreError, and changes nothing, if it does not fit the plan."""
        self._check(plan, result)
        if self._batch.ending:
            self.release_ended()
        report, emitted = CommitReport(), list[int]()
        if result.num_steps > 1:
            report.fast_forward = self._manager.fast_forward(
                self._batch.calendar, result.num_steps, plan.usage
            )
        if plan.steady or not self._batch.calendar.rows:  # else they wait for prompts
            self._advance_steady(result, report)
        for group in list(self._batch.others):
            if group.rows:
                self._advance(group, plan, result, report, emitted)
        report.emitted = [*plan.steady_ids, *emitted] if emitted else plan.steady_ids
        self._batch.settle()
        if self._static and not len(self._batch):
            held, self.held = self.held, []
            for group in held:
                self._close(group, report)
        return report

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        if not 1 <= result.num_steps <= plan.num_steps:
            raise CoreError(
                f"step {plan.step}: {result.num_steps} steps taken, 1 to {plan.num_steps} were planned"
            )
        if result.accepted:
            drafts = {row.request_id: row.drafts for row in plan.other_rows}
            for request_id, accepted in result.accepted.items():
                if not 0 <= accepted <= drafts.get(request_id, 0):
                    raise CoreError(
                        f"step {plan.step}: request {request_id} accepts {accepted} draft tokens, "
                        f"it had {drafts.get(request_id, 0)}"
                    )
        for request_id, branches in result.ended.items():
            ended = self._groups.get(request_id)
            if ended is not None and not set(branches) <= set(ended.branches):
                raise CoreError(
                    f"step {plan.step}: request {request_id} ends branches {sorted(branches)}, it has {ended.branches}"
                )
        for group in self._batch.others:
            if group.is_beam and group.rows and group.rows[0].samples and group.forked:
                check_parents(group.sequences, result.parents.get(group.request.request_id, ()))

    # -- steady groups -------------------------------------------------------------------------------------

    def _advance_steady(self, result: StepResult, report: CommitReport) -> None:
        calendar = self._batch.calendar
        ended = calendar.tick(result.num_steps)
        if result.finished:
            whole = set(ended)
            ended = [g for g in calendar.groups if g in whole or g.request.request_id in result.finished]
        for group in ended:
            self._finish(group, report)
        for request_id, branches in result.ended.items():
            steady = self._groups.get(request_id)
            if steady is not None and steady in calendar.groups:
                self._end_branches(steady, branches, report)

    def _end_branches(self, group: Group, branches: Collection[int], report: CommitReport) -> None:
        """End sampled branches; the request ends with its last branch."""
        if len(branches) == group.width:
            self._finish(group, report)
            return
        for branch in branches:
            self._manager.release(self._batch.drop(group, branch))

    # -- the others ----------------------------------------------------------------------------------------

    def _advance(
        self, group: Group, plan: StepPlan, result: StepResult, report: CommitReport, emitted: list[int]
    ) -> None:
        rows, group.rows = group.rows, []
        if group.proposes:
            group.decoded = plan.step
        group.proposes = rows[0].samples
        request_id, sampled = group.request.request_id, rows[0].samples
        if rows[0].drafts:
            accepted = self._verify(group, plan, result)
            report.tokens = {**report.tokens, request_id: 1 + accepted}
            group.generated += accepted
        else:
            for row in rows:
                row.sequence.computed += row.query_len
        if sampled:
            group.generated += 1
            emitted.append(request_id)
        if sampled and (not group.remaining or request_id in result.finished):
            self._finish(group, report)
            return
        if not group.forked:
            root = group.sequences[0]
            if group.request.width > 1 and root.computed == group.request.prompt_tokens:
                self._manager.fork(root, group.fork())
        elif sampled and group.is_beam:
            self._manager.reparent(group.sequences, result.parents[request_id])
        if request_id in result.ended:
            self._end_branches(group, result.ended[request_id], report)

    def _verify(self, group: Group, plan: StepPlan, result: StepResult) -> int:
        """Keep the accepted draft tokens, as far as the request goes, and drop the others; returns how many are kept.

        Those that fill a row are never accepted.
        """
        request_id, (root,) = group.request.request_id, group.sequences
        right = 0 if request_id in plan.padded else result.accepted.get(request_id, 0)
        writer, accepted = group.draft or root, min(right, group.remaining - 1)
        drafts, start = group.drafted, writer.computed
        writer.computed = start + 1 + drafts
        self._manager.truncate(writer, start + 1 + accepted)
        if group.draft is not None:
            self._manager.promote(root, group.draft)
            group.draft = None
        stats = self._stats[request_id]
        stats.drafted_tokens += drafts
        stats.accepted_tokens += right
        return accepted

    # -- ends ----------------------------------------------------------------------------------------------

    def _finish(self, group: Group, report: CommitReport) -> None:
        if self._holds:
            self._batch.hold(group)
            self._report(group, report)
            return
        self._batch.remove(group)
        if self._static:
            self.held.append(group)
            return
        self._close(group, report)

    def release_ended(self) -> None:
        """Release what the step before the last one ended, or the last one where none was scheduled since."""
        for group in list(self._batch.ending):
            self._batch.remove(group)
            self.release_group(group)

    def _close(self, group: Group, report: CommitReport) -> None:
        self.release_group(group)
        self._report(group, report)

    def _report(self, group: Group, report: CommitReport) -> None:
        request_id = group.request.request_id
        del self._groups[request_id]
        report.finished.append(request_id)
        report.stats[request_id] = self._stats.pop(request_id)

    def release_group(self, group: Group) -> None:
        """Release all memory of the group."""
        for sequence in group.holders:
            self._manager.release(sequence)
