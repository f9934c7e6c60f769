"""Drives a scheduler by hand, with a brute-force model of the tensors beside it.

The model stores, per block, which token stands in each slot; a token is named by all that its K and V depend on (its
sequence's tokens up to it). Reading a slot that holds anything else is an error, as it would be on a device.
"""

import random
from collections.abc import Callable

from engine.core.identity import TokenIdentity
from engine.core.options import Decoding
from engine.core.plan import Row, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import RequestStats
from engine.core.scheduling.scheduler import Scheduler

EMPTY = None
Slot = tuple[int, int]


class SlotModel:
    """Executes plans on a dictionary of slots instead of tensors."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.size = scheduler.manager.block_size
        self.slots: dict[Slot, tuple] = {}
        self.host: dict[Slot, tuple] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.drafts: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.adapters: dict[int, str | None] = {}
        self.random = random.Random(seed)
        self.copies = 0
        self.plans: list[StepPlan] = []
        self.digests: list[str] = []
        self.finished: list[int] = []
        self.stats: dict[int, RequestStats] = {}

    def submit(self, request: Request, prompt: list[int], adapter: str | None = None) -> None:
        assert len(prompt) == request.prompt_tokens
        self.scheduler.submit(request)
        self.requests[request.request_id] = request
        self.adapters[request.request_id] = adapter
        self.tokens[request.request_id, 0] = list(prompt)

    # -- a step --------------------------------------------------------------------------------------------

    def step(
        self,
        choose_parents: Callable[[int], list[int]] | None = None,
        *,
        accept: float = 0.5,
        finish: float = 0.0,
        end: float = 0.0,
        max_steps: int = 1,
    ) -> StepPlan:
        """One plan. `accept`, `finish`, `end`: chances of a draft token, a request, a sampled branch."""
        plan = self.scheduler.schedule(max_steps)
        self.digests.append(plan.digest())
        self.execute(plan)
        self.compare_usage(plan)
        num_steps = self.random.randint(1, plan.num_steps)
        result = self.answer(plan, choose_parents, accept, finish, end, num_steps)
        lengths = [len(row.table) for row in plan.rows]
        report = self.scheduler.commit(plan, result)
        self.fast_forward(plan, lengths, num_steps)
        self.finished += report.finished
        self.stats |= report.stats
        self.scheduler.manager.check()
        self.plans.append(plan)
        return plan

    def run(self, **kwargs: Callable[[int], list[int]]) -> None:
        steps = 0
        while self.scheduler.has_work:
            self.step(**kwargs)
            steps += 1
            assert steps < 20_000, "the scheduler does not come to an end"

    def execute(self, plan: StepPlan) -> None:
        for stale in plan.stale:
            self.void(*stale)
        for device, host in plan.swap_out:
            self.move(self.slots, device, self.host, host)
        for block in plan.frees:
            self.void(block, 0, self.size)
        for host, device in plan.swap_in:
            self.move(self.host, host, self.slots, device)
        moved = [
            (destination, offset, self.slots.get((source, offset)))
            for source, destination in plan.copies
            for offset in range(self.size)
        ]
        for destination, offset, value in moved:
            self.slots.pop((destination, offset), None)
            if value is not EMPTY:
                self.slots[destination, offset] = value
        self.copies += len(plan.copies)
        self.copied = {destination for _, destination in plan.copies}
        for row in plan.rows:
            assert row.query_len >= 1, "a row that computes nothing"
            if row.drafts:
                self.drafts[row.request_id] = [self.random.randrange(10**9) for _ in range(row.drafts)]
        for row in plan.rows:
            self.write(row)
        for row in plan.rows:
            self.read(row)

    def compare_usage(self, plan: StepPlan) -> None:
        """The slots that hold something are those that the counters name."""
        written = sum(1 for value in self.slots.values() if value is not EMPTY)
        assert written == plan.usage.token + plan.usage.cached, (written, plan.usage)

    def void(self, block: int, first: int, end: int) -> None:
        for offset in range(first, end):
            self.slots.pop((block, offset), None)

    def move(self, source: dict[Slot, tuple], one: int, target: dict[Slot, tuple], other: int) -> None:
        for offset in range(self.size):
            target.pop((other, offset), None)
            if (one, offset) in source:
                target[other, offset] = source[one, offset]

    # -- slots ---------------------------------------------------------------------------------------------

    def known(self, row: Row) -> list[int]:
        if row.drafts:
            return self.tokens[row.request_id, 0] + self.drafts[row.request_id]
        return self.tokens[row.request_id, row.branch]

    def slot(self, row: Row, position: int) -> Slot:
        if isinstance(row.table, range):  # of a reservation the plan shows what the first step needs
            return row.table.start + position, 0
        return row.table[position // self.size], position % self.size

    def write(self, row: Row, later: int = 0) -> None:
        tokens = self.known(row)
        start = row.context_len + later
        assert start + row.query_len <= len(tokens)
        for position in range(start, start + row.query_len):
            slot = self.slot(row, position)
            value = self.value(row, tokens, position)
            assert slot not in self.slots or self.slots[slot] == value, (
                f"{slot} overwritten while it holds a token"
            )
            self.slots[slot] = value

    def read(self, row: Row) -> None:
        tokens = self.known(row)
        for position in range(row.context_len + row.query_len):
            assert self.slots.get(self.slot(row, position)) == self.value(row, tokens, position)

    def value(self, row: Row, tokens: list[int], position: int) -> tuple:
        """All that K and V at `position` depend on."""
        return (self.adapters.get(row.request_id), *tokens[: position + 1])

    def fast_forward(self, plan: StepPlan, lengths: list[int], num_steps: int) -> None:
        """The further steps of a fast-forward write into the blocks that the commit has taken."""
        if num_steps > 1:
            for row, length in zip(plan.rows, lengths, strict=True):
                for block in row.table[length:]:
                    self.void(block, 0, self.size)
            for row in plan.rows:
                for later in range(1, num_steps):
                    self.write(row, later)

    # -- answers -------------------------------------------------------------------------------------------

    def answer(
        self,
        plan: StepPlan,
        choose_parents: Callable[[int], list[int]] | None,
        accept: float,
        finish: float,
        end: float,
        num_steps: int,
    ) -> StepResult:
        parents, accepted, ended, finished = {}, {}, {}, set()
        for rid, rows in self.sampling(plan).items():
            if rows[0].drafts:
                accepted[rid] = self.verify(rid, rows[0], 0 if rid in plan.padded else accept)
                continue
            parents[rid] = self.sample(rid, rows, choose_parents, num_steps)
            if self.random.random() < finish:
                finished.add(rid)
            elif self.requests[rid].decoding is Decoding.sample and len(rows) > 1:
                ended[rid] = [row.branch for row in rows if self.random.random() < end]
        return StepResult(num_steps, parents, frozenset(finished), ended, accepted)

    def sampling(self, plan: StepPlan) -> dict[int, list[Row]]:
        groups: dict[int, list[Row]] = {}
        for row in plan.rows:
            if row.samples:
                groups.setdefault(row.request_id, []).append(row)
        return groups

    def verify(self, rid: int, row: Row, chance: float) -> int:
        accepted = 0
        while accepted < row.drafts and self.random.random() < chance:
            accepted += 1
        self.tokens[rid, 0] += [*self.drafts.pop(rid)[:accepted], self.random.randrange(10**9)]
        self.tell(rid, 0, 1 + accepted)
        return accepted

    def sample(
        self, rid: int, rows: list[Row], choose_parents: Callable[[int], list[int]] | None, num_steps: int
    ) -> list[int]:
        request = self.requests[rid]
        width = request.width
        if request.decoding is Decoding.beam and len(rows) == width:
            parents = choose_parents(width) if choose_parents else self.random.choices(range(width), k=width)
        elif len(rows) == 1:
            parents = [0] * width
        else:
            parents = list(range(len(rows)))
        old = [self.tokens[rid, row.branch] for row in rows]
        branches = [row.branch for row in rows] if len(rows) > 1 else list(range(width))
        for branch, parent in zip(branches, parents, strict=True):
            self.tokens[rid, branch] = [
                *old[parent],
                *(self.random.randrange(10**9) for _ in range(num_steps)),
            ]
            self.tell(rid, branch, num_steps)
        return parents

    def tell(self, rid: int, branch: int, count: int) -> None:
        identity = self.requests[rid].identity
        if isinstance(identity, TokenIdentity):
            identity.extend(branch, self.tokens[rid, branch][-count:])
