"""Drives a scheduler by hand, with a brute-force model of the tensors beside it.

The model stores, per block, which token stands in each slot; a token is named by all that its K and V depend on (its
sequence's tokens up to it). Reading a slot that holds anything else is an error, as it would be on a device.
"""

import random
from collections.abc import Callable

from engine.core.plan import Row, StepPlan, StepResult
from engine.core.request import Decoding, Request
from engine.core.scheduler import Scheduler

EMPTY = None


class SlotModel:
    """Executes plans on a dictionary of slots instead of tensors."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.size = scheduler.manager.block_size
        self.slots: dict[tuple[int, int], tuple] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.random = random.Random(seed)
        self.copies = 0
        self.plans: list[StepPlan] = []
        self.digests: list[str] = []
        self.finished: list[int] = []

    def submit(self, request: Request, prompt: list[int]) -> None:
        assert len(prompt) == request.prompt_tokens
        self.scheduler.submit(request)
        self.requests[request.request_id] = request
        self.tokens[request.request_id, 0] = list(prompt)

    def step(self, choose_parents: Callable[[int], list[int]] | None = None) -> StepPlan:
        plan = self.scheduler.schedule()
        self.digests.append(plan.digest())
        self.execute(plan)
        written = sum(1 for value in self.slots.values() if value is not EMPTY)
        assert written == plan.usage.token + plan.usage.cached
        parents = {rid: self.sample(rid, rows, choose_parents) for rid, rows in self.sampling(plan).items()}
        report = self.scheduler.commit(plan, StepResult(parents=parents))
        self.finished += report.finished
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
        for block in plan.frees:
            for offset in range(self.size):
                self.slots.pop((block, offset), None)
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
        for row in plan.rows:
            self.write(row)
        for row in plan.rows:
            self.read(row)

    def known(self, row: Row) -> list[int]:
        return self.tokens[row.request_id, row.branch]

    def slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.table[position // self.size], position % self.size

    def write(self, row: Row) -> None:
        tokens = self.known(row)
        assert row.context_len + row.query_len <= len(tokens)
        for position in range(row.context_len, row.context_len + row.query_len):
            slot = self.slot(row, position)
            value = tuple(tokens[: position + 1])
            assert slot not in self.slots or self.slots[slot] == value, (
                f"{slot} overwritten while it holds a token"
            )
            self.slots[slot] = value

    def read(self, row: Row) -> None:
        tokens = self.known(row)
        for position in range(row.context_len + row.query_len):
            assert self.slots.get(self.slot(row, position)) == tuple(tokens[: position + 1])

    def sampling(self, plan: StepPlan) -> dict[int, list[Row]]:
        groups: dict[int, list[Row]] = {}
        for row in plan.rows:
            if row.samples:
                groups.setdefault(row.request_id, []).append(row)
        return groups

    def sample(
        self, rid: int, rows: list[Row], choose_parents: Callable[[int], list[int]] | None
    ) -> list[int]:
        request = self.requests[rid]
        width = request.width
        if len(rows) < width:
            parents = [0] * width
        elif request.decoding is Decoding.BEAM:
            parents = choose_parents(width) if choose_parents else self.random.choices(range(width), k=width)
        else:
            parents = list(range(width))
        old = [self.tokens[rid, row.branch] for row in rows]
        for branch, parent in enumerate(parents):
            self.tokens[rid, branch] = [*old[parent], self.random.randrange(10**9)]
        return parents
