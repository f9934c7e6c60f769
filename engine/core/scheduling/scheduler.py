"""Continuous batching: which rows run in the next step.

There is one loop without separate prefill and decode phases, as in vLLM's v1 scheduler. Each request has computed
tokens and known tokens, and each step computes more of them within a token budget. Running requests come first: steady
decoders, then the others in order of admission. When blocks run out, a group is preempted: it is recomputed later, or
swapped to the host. Waiting requests are then admitted in queue order, but only if the step has preempted no group and
no group is swapped out. Where steps are not mixed, as in SGLang's, all that decodes waits for a step of prompts alone
whenever one has rows. A steady decoder costs scheduling time only in a step in which it needs a block. Below
`Scheduler` are the admission rules.
"""

from collections.abc import Callable, Sequence

import numpy as np

from engine.core.errors import CoreError, NeverFitsError
from engine.core.memory.manager import KVCacheManager
from engine.core.options import Preemption, SchedulerLimits
from engine.core.plan import StepPlan, StepResult
from engine.core.policies import Admission, AdmitWhatFits, Policies
from engine.core.request import Request
from engine.core.scheduling.batch import (
    BatchRows,
    RowScheduler,
    RunningBatch,
    StepBuilder,
    WaitingQueue,
    draft_slots,
)
from engine.core.scheduling.commit import Commit, CommitReport, RequestStats
from engine.core.sequence import Group, SteadyRows

_FALLING = 0.99  # what one step leaves of the adaptive watermark
_NONE_STEADY = SteadyRows([], [], [], np.zeros(0, dtype=np.int64))


class Scheduler:
    """Plans steps over one KV cache manager. Call `schedule()` and `commit()` in turn:

    >>> from engine.core import PagedManager, Request, Scheduler, SchedulerLimits, StepResult
    >>> scheduler = Scheduler(PagedManager(num_blocks=1000, block_size=16), SchedulerLimits())
    >>> scheduler.submit(Request(7, prompt_tokens=40, output_tokens=3))
    >>> while scheduler.has_work:
    ...     plan = scheduler.schedule()
    ...     report = scheduler.commit(plan, StepResult())  # what an executor answers
    ...     print(plan.query_len, report.finished)
    [40] []
    [1] []
    [1] [7]

    vLLM's scheduler has the same interface: `add_request`, `schedule`, `update_from_output` (here `commit`) and
    `finish_requests` (here `abort`). `policies` is used instead of the built-in policies that `limits.policy` names.
    `stats` has the counters of every request that has not ended; those of an ended request are in the `CommitReport`,
    or returned by `abort`.
    """

    def __init__(
        self, manager: KVCacheManager, limits: SchedulerLimits, policies: Policies | None = None
    ) -> None:
        self.manager = manager
        self.limits = limits
        self.policies = policies or Policies.of(limits.policy)
        self.waiting = WaitingQueue()  # they have no blocks on the device
        self.swapped = WaitingQueue()  # their blocks are in host memory
        self.stats: dict[int, RequestStats] = {}
        self._batch = RunningBatch(manager.growth, limits.max_batched_tokens)
        self._groups: dict[int, Group] = {}
        self._step = 0
        self._submitted = 0
        self.rests = 0  # how often no step was under way
        self._alone: list[tuple[int, int]] = []  # the last that were preempted although they ran alone
        self._decodes = self._decoded = True  # whether steady groups run in this step, and in the one before
        self._under_way = False  # what the last step chose is not known when the next one is scheduled
        self._open: int | None = None  # the step that is scheduled and not yet committed
        self._rows = RowScheduler(manager, limits)
        self._admission = AdmissionRules(manager, self._batch, limits, self.policies.admission)
        self._commit = Commit(manager, self._batch, self._groups, self.stats, limits)

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs or is swapped out: then `schedule()` can be called."""
        batch = self._batch
        return bool(batch.others or batch.calendar.groups or len(self.waiting) or len(self.swapped))

    @property
    def running(self) -> list[Group]:
        """The running groups in order of admission."""
        return self._batch.groups()

    def submit(self, request: Request) -> None:
        """Add a request to the queue. Raises NeverFitsError, with the reason, if no schedule can ever serve it."""
        reason = self.never_fits(request)
        if reason:
            raise NeverFitsError(f"request {request.request_id} can never be served: it {reason}")
        if request.request_id in self._groups:
            raise CoreError(f"request {request.request_id} was submitted before and has not ended")
        group = Group(request, self.policies.order.key(request, self._submitted))
        self._submitted += 1
        self.stats[request.request_id] = RequestStats()
        self._groups[request.request_id] = group
        self.waiting.push(group)

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None."""
        limits, total = self.limits, request.prompt_tokens + request.output_tokens
        if limits.max_model_len is not None and total > limits.max_model_len:
            return f"has {total} tokens in all, the longest served is {limits.max_model_len}"
        if request.width > min(limits.max_running, limits.max_batched_tokens):
            return f"has {request.width} sequences, a step takes {min(limits.max_running, limits.max_batched_tokens)}"
        slots, drafts = draft_slots(request), request.speculation.tokens if request.speculation else 0
        most = limits.max_batched_tokens - slots
        if not limits.chunked_prefill and request.final_kv_tokens > most:
            return f"may prefill {request.final_kv_tokens} tokens at once, a step takes {most}"
        if slots and 1 + drafts > min(most, limits.long_prefill_tokens or most):
            return f"verifies {drafts} draft tokens at once, a step takes {most} tokens, a chunk {limits.most_chunk}"
        return self.manager.never_fits(request)

    def abort(self, request_id: int) -> RequestStats:
        """End a waiting, running or swapped request and release its memory; returns its counters.

        Raises CoreError if it is not there.
        """
        group = self._groups.get(request_id)
        if group is None:
            raise CoreError(f"request {request_id} is neither waiting nor running: it cannot be aborted")
        if group in self._batch:
            self._batch.remove(group)
            self._commit.release_group(group)
        elif group in self.swapped:
            self.swapped.remove(group)
            self.manager.forget_swapped(group)
        elif group in self.waiting:
            self.waiting.remove(group)
        else:
            raise CoreError(f"request {request_id} has ended: it waits for the rest of its batch")
        del self._groups[request_id]
        return self.stats.pop(request_id)

    # -- a step --------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1, waited: Callable[[], None] | None = None) -> StepPlan:
        """Plan the next step. With `max_steps` above 1, the plan may cover up to so many identical decode steps.

        Where steps are scheduled ahead and none can run before the one under way has ended, `waited` is called then.
        """
        if self._open is not None:
            raise CoreError(f"step {self._open} waits for its result: commit it before the next is scheduled")
        if max_steps < 1:
            raise CoreError(f"max_steps is {max_steps}, must be at least 1")
        if not self.has_work:
            raise CoreError("nothing is running or waiting: there is no step to schedule")
        step, self._decoded = StepBuilder(self.limits.max_batched_tokens), self._decodes
        self._fill(step)
        if self._batch.ending and not (step.rows or self._batch.calendar.rows):
            # vLLM's step without rows: it is over as soon as the one before it is
            before, step = step.preempted, StepBuilder(self.limits.max_batched_tokens)
            self._settle()
            if waited is not None:
                waited()
            self._fill(step)
            step.preempted = [*before, *step.preempted]
        if not (len(self._batch) or step.preempted or self._commit.held):  # no later step has more room
            head = self.swapped.head or self.waiting.head
            raise CoreError(f"nothing runs, and request {head and head.request.request_id} has no room")
        plan = self._plan(step, 1 if self._batch.ending else max_steps)
        self._open = self._step
        self._step += 1
        return plan

    def rest(self) -> None:
        """No step is under way any more: release what the last one ended."""
        self.rests += 1
        self._settle()

    def _settle(self) -> None:
        self._under_way = False
        self._commit.release_ended()

    def _fill(self, step: StepBuilder) -> None:
        """Continue running groups, then admit others; or prompts alone, where steps are not mixed."""
        batch, mixed = self._batch, self.limits.mixed_steps
        self._decodes = mixed or not self._fill_with_prompts(step)
        if not self._decodes:
            return
        if batch.calendar.groups:
            self._continue_steady(step)
        if batch.others:
            self._continue_others(step)
        if batch.calendar.groups:
            self.manager.advance(batch.calendar)
        if step.preempted:
            self._admission.raise_floor()
        else:
            self._swap_in_groups(step)
            if mixed and not len(self.swapped):
                self._admit_waiting(step)

    def _fill_with_prompts(self, step: StepBuilder) -> bool:
        """Continue prompts and admit groups; whether the step has rows of them."""
        self._continue_others(step, prompts=True)
        if step.preempted:
            self._admission.raise_floor()
        elif not len(self.swapped):
            self._admit_waiting(step)
        return bool(step.rows)

    def commit(self, plan: StepPlan, result: StepResult) -> CommitReport:
        """Apply the executor's result of the last plan. Raises CoreError, and changes nothing, if it does not fit."""
        if plan.step != self._open:
            raise CoreError(f"step {plan.step} does not wait for a result")
        report = self._commit.apply(plan, result)
        self._open = None
        self._under_way = self.limits.ahead
        return report

    def _continue_steady(self, step: StepBuilder) -> None:
        """Each steady sequence computes one token. Only sequences whose last block is full need a new block."""
        calendar, manager = self._batch.calendar, self.manager
        for group in calendar.due():
            while group in calendar.groups and not manager.can_append(group):
                self._make_room(step, self._batch.groups())
            if group in calendar.groups:
                step.appended[group] = manager.append(group)
        step.budget -= calendar.rows

    def _continue_others(self, step: StepBuilder, *, prompts: bool = False) -> None:
        """Continue the groups that are not steady, of which only some decode; with `prompts` not these."""
        others, calendar, index, cap = self._batch.others, self._batch.calendar, 0, self._prefill_cap()
        while index < len(others) and step.budget:
            group = others[index]
            group.rows = [] if prompts and group.decodes else self._rows.rows(group, step.budget, cap)
            while group.rows and not self.manager.can_extend(group.rows):
                steady = calendar.rows
                self._make_room(step, self._batch.groups(index))
                step.budget += 0 if prompts else steady - calendar.rows  # with prompts they have taken none
            if index < len(others) and others[index] is group:
                self._rows.extend(group, step)
                index += 1
        for group in others[index:]:
            group.rows = []

    def _make_room(self, step: StepBuilder, candidates: Sequence[Group]) -> None:
        """Preempt one of `candidates`, which are in running order."""
        victim = candidates[self.policies.victim.choose(candidates)]
        unseen = self._unseen(victim)
        step.preempted.append(victim.request.request_id)
        if victim in self._batch.ending:  # all that is left of it is its blocks
            step.ended += 1
            self._batch.remove(victim)
            self.manager.preempt(victim, unseen)
            return
        stats, mode = self.stats[victim.request.request_id], self.limits.preemption
        stats.preemptions += 1
        step.appended.pop(victim, None)
        self._batch.remove(victim)
        if not len(self._batch):
            alone = victim.request.request_id, victim.generated
            self._alone = [one for one in self._alone if one == alone] + [alone]
            if len(self._alone) > 99:  # none of these gave it a token more
                raise CoreError(f"request {victim.request.request_id} has no room although it runs alone")
        # A group without generated tokens is cheaper to compute again. One with a draft child is not swapped either.
        swaps = mode is Preemption.swap or (mode is Preemption.auto and len(victim.sequences) > 1)
        if swaps and victim.generated and victim.draft is None and self.manager.can_swap_out(victim):
            stats.swaps += 1
            victim.rows, victim.lost, victim.proposes = [], 0, False
            self.manager.swap_out(victim)
            self.swapped.push(victim)
            return
        self.manager.preempt(victim, unseen)
        stats.recomputed_tokens -= victim.restart()  # of what its admission counted
        self.waiting.push(victim)

    def _unseen(self, group: Group) -> int:
        """How many tokens of each sequence the step under way computes that the one before it has chosen."""
        others, clock = self._batch.others, self._batch.calendar.clock
        steady = self._decoded and group not in others and group.known < clock.now
        return int(self._under_way and (steady or group.decoded == self._step - 1))

    def _prefill_cap(self) -> int | None:
        """The largest chunk of one prompt, None for no limit. A request that is alone gets the whole budget."""
        limits, cap = self.limits, self.limits.long_prefill_tokens
        if cap is None or (requests := len(self._batch) + len(self.waiting)) <= 1:
            return None
        return max(cap, limits.max_batched_tokens // requests) if limits.long_prefill_adaptive else cap

    # -- admission -----------------------------------------------------------------------------------------

    def _swap_in_groups(self, step: StepBuilder) -> None:
        """Swap groups in. They come before waiting groups: no group is admitted while one is still swapped out."""
        while step.budget and (group := self.swapped.head) is not None and self._admission.may_swap_in(group):
            self.swapped.pop()
            self.manager.swap_in(group)
            self._batch.add(group)
            step.resumed.append(group.request.request_id)
            self._rows.enter(group, step, self._prefill_cap())

    def _admit_waiting(self, step: StepBuilder) -> None:
        """Admit waiting groups in queue order, up to the first one that does not fit."""
        while step.budget and (group := self.waiting.head) is not None:
            if self.limits.static_batch and len(self._batch) > len(step.admitted):
                return
            hits = self.manager.lookup(group)
            cached = len(hits) * self.manager.block_size
            cap, padded = self._prefill_cap(), self._pads(group, cached, step)
            if not self._admission.may_admit(group, hits, cached, step.budget, cap, padded):
                return
            self.waiting.pop()
            self.manager.admit(group, hits)
            stats = self.stats[group.request.request_id]
            if stats.preemptions:
                stats.resumed_hit_tokens += cached
                stats.recomputed_tokens += max(0, group.lost - cached)
            else:
                stats.hit_tokens += cached
            step.hit_tokens += cached
            step.admitted.append(group.request.request_id)
            self._batch.add(group)
            if padded:
                step.padded.append(group.request.request_id)
            self._rows.enter(group, step, cap, padded)

    def _pads(self, group: Group, cached: int, step: StepBuilder) -> bool:
        """Whether a request with drafts that enters with one token left gets draft tokens nobody proposed.

        So all rows of the step are equally long, where none computes a chunk (vLLM's `pad_spec_decode`).
        """
        speculation, longest = group.request.speculation, self.limits.max_model_len
        if speculation is None or not speculation.whole or group.root_target - cached != 1:
            return False
        continued = [
            each for each in self._batch.others if each.rows and each.request.request_id not in step.admitted
        ]
        if not all(each.proposes for each in continued):
            return False
        fits = longest is None or cached + speculation.tokens + 2 <= longest
        return fits and bool(continued or self._batch.calendar.rows or cached)

    # -- the plan ------------------------------------------------------------------------------------------

    def _plan(self, step: StepBuilder, max_steps: int) -> StepPlan:
        """The plan, with the copies, frees and swaps that the manager has collected since the last one."""
        manager, calendar, head = self.manager, self._batch.calendar, self.waiting.head
        num_steps = self._fast_forward_steps(step, max_steps) if max_steps > 1 else 1
        steady = calendar.view() if self._decodes else _NONE_STEADY
        (swap_out, swap_in), loads = manager.drain_swaps(), manager.drain_loads()
        return StepPlan(
            step=self._step,
            rows=BatchRows(steady, calendar.clock.now, step.rows),
            copies=manager.drain_copies(),
            frees=manager.drain_frees(),
            num_steps=num_steps,
            admitted=step.admitted,
            preempted=step.preempted,
            new_blocks=step.new_blocks + sum(step.appended.values()) + loads.blocks,
            hit_tokens=step.hit_tokens,
            running=len(self._batch),
            waiting=len(self.waiting) + len(self.swapped) + step.ended,
            usage=manager.usage(head.request if head else None),
            swap_out=swap_out,
            swap_in=swap_in,
            stale=manager.drain_stale(),
            resumed=step.resumed,
            padded=step.padded,
            steady=len(steady.sequences),
            steady_ids=steady.request_ids,
            loads=loads,
        )

    def _fast_forward_steps(self, step: StepBuilder, max_steps: int) -> int:
        """How many identical decode steps the plan covers (fast-forward); the steps differ by one token per row.

        All running sequences decode. Nothing can change until a sequence finishes, blocks run out, or a request
        arrives; the caller shortens the fast-forward at an arrival. A waiting request that does not fit now will not
        fit before then: free blocks only get fewer, and decoding makes no block that the request could hit. Where
        outputs are shared, decoding does, and where the admission policy is the user's own, it may decide differently
        later: nothing is fast-forwarded beside shared outputs, or while requests wait for a user's policy or for the
        adaptive watermark to fall.
        """
        calendar = self._batch.calendar
        if not step.only_steady or self._batch.others or not calendar.rows or calendar.sharing:
            return 1
        if len(self.waiting) and not self._admission.is_steady:
            return 1
        steps = min(max_steps, calendar.steps_to_end())
        return self.manager.fast_forward_limit(calendar, steps) if steps > 1 else 1


class AdmissionRules:
    """Decides whether a waiting or a swapped group may join the batch now. No decision changes anything."""

    def __init__(
        self, manager: KVCacheManager, batch: RunningBatch, limits: SchedulerLimits, policy: Admission
    ) -> None:
        self._manager = manager
        self._batch = batch
        self._limits = limits
        self._policy = policy
        self._watermark = int(limits.watermark * (manager.num_blocks + 1))  # vLLM counts the null block
        # the adaptive floor in blocks after the last preemption, its step
        self._raised, self._raised_at = 0.0, 0

    @property
    def is_steady(self) -> bool:
        """Whether a group that is refused now stays refused until memory is released."""
        return self.only_built_in and not self._raised_blocks()

    def raise_floor(self) -> None:
        """A step preempted a group: keep two blocks free for each running sequence, or twice what was kept, up to half
        of the pool. This adaptive watermark then falls by 1 % a step.
        """
        if self._limits.adaptive_watermark:
            most = self._manager.num_blocks // 2
            self._raised = float(min(most, 2 * max(self._spare_blocks(), self._batch.sequences)))
            self._raised_at = self._batch.calendar.clock.now

    @property
    def only_built_in(self) -> bool:
        """Whether no policy of the user's is asked."""
        return isinstance(self._policy, AdmitWhatFits)

    def _spare_blocks(self) -> int:
        return max(self._watermark, self._raised_blocks()) if len(self._batch) else 0

    def _raised_blocks(self) -> int:
        """The adaptive watermark in blocks, 0 where it has fallen."""
        steps = self._batch.calendar.clock.now - self._raised_at
        return int(self._raised * _FALLING**steps) if self._raised else 0

    def may_swap_in(self, group: Group) -> bool:
        """Whether the batch has room for every branch of a swapped group, and the pool has enough blocks."""
        has_room = self._batch.sequences + group.width <= self._limits.max_running
        return has_room and self._manager.can_swap_in(group, self._spare_blocks())

    def may_admit(
        self,
        group: Group,
        hits: Sequence[int],
        cached: int,
        budget: int,
        prefill_cap: int | None = None,
        padded: bool = False,
    ) -> bool:
        """Whether the batch has room for every branch, the budget is large enough, and the pool has enough blocks.

        Where the first chunk alone must fit, it has at most `prefill_cap` tokens. Raises CoreError if the user's policy
        refuses the request while the batch is empty.
        """
        limits, request = self._limits, group.request
        if self._batch.sequences + group.width > limits.max_running:
            return False
        ahead = request.most_kv_tokens - request.final_kv_tokens
        if ahead:
            budget -= draft_slots(request)
            if budget <= 0 or (padded and 1 + ahead > budget):
                return False
        if not limits.chunked_prefill and group.root_target - cached > budget:
            return False
        first = budget if prefill_cap is None else min(budget, prefill_cap)
        wished = min(group.root_target, cached + first)
        end = self._manager.chunk_end(group, cached, wished, limits.most_chunk, hits)
        if end == cached < wished:
            return False
        tokens = None if limits.admit_whole_prompt else end
        if ahead:
            end += 2 * ahead if padded else ahead
            end = end if limits.max_model_len is None else min(end, limits.max_model_len)
        if not self._manager.can_admit(group, hits, self._spare_blocks(), tokens, end):
            return False
        if self.only_built_in:
            return True
        usage, running = self._manager.usage(None), len(self._batch)
        if self._policy.allows(request, (usage.free + usage.cached) // self._manager.block_size, running):
            return True
        if not running:
            raise CoreError(
                f"request {request.request_id}: the admission policy {type(self._policy).__name__} refuses it "
                f"although nothing is running, so it would wait for ever"
            )
        return False
