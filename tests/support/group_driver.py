"""Random walks over caches with groups, beside a model that stores what every slot and state depends on."""

import random
from dataclasses import dataclass

import numpy as np
from slot_model import SlotModel

from engine.core.errors import CoreError, NeverFitsError
from engine.core.identity import TokenIdentity
from engine.core.memory.group_layout import GroupLayout, LayerSet, separate_layout, uniform_layout
from engine.core.memory.group_pages import NO_PAGE, GroupTables
from engine.core.memory.grouped import GroupedManager, pages_of
from engine.core.options import GroupKind, GroupPages, SchedulerLimits, Scheduling, StateMode, WindowHits
from engine.core.plan import Row, StepPlan
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler

FULL = LayerSet(GroupKind.full, 2, 8)
WINDOW = LayerSet(GroupKind.window, 4, 8, window=7)
SHORT = LayerSet(GroupKind.window, 3, 4, window=3)
LATENT = LayerSet(GroupKind.latent, 2, 8)
STATE = LayerSet(GroupKind.state, 3, 24)


@dataclass(frozen=True)
class GroupSetup:
    """A model's layers, and one choice of every policy."""

    sets: tuple[LayerSet, ...] = (FULL, WINDOW)
    pages: GroupPages = GroupPages.uniform
    size: int = 4
    state_every: int | None = None
    memory: int = 3200  # bytes
    budget: int = 12
    running: int = 5
    caching: bool = True
    hits: WindowHits = WindowHits.window
    interval: int | None = 0
    states: StateMode = StateMode.align
    behind_first: bool = False
    scheduling: Scheduling = Scheduling.fcfs
    whole: bool = True
    longest: int = 48

    def layout(self) -> GroupLayout:
        if self.pages is GroupPages.uniform:
            return uniform_layout(self.sets, self.size, self.states)
        return separate_layout(
            self.sets, self.size, state_every=self.state_every, pages=self.pages, states=self.states
        )

    def manager(self) -> GroupedManager:
        layout = self.layout()
        counts = layout.page_counts(self.memory, self.longest, self.budget)
        pages = pages_of(layout, counts, behind_first=self.behind_first)
        return GroupedManager(
            layout,
            pages,
            most_chunk=self.budget,
            prefix_caching=self.caching,
            window_hits=self.hits,
            retention_interval=self.interval,
        )

    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            self.budget,
            self.running,
            max_model_len=self.longest,
            policy=self.scheduling,
            admit_whole_prompt=self.whole,
        )


class GroupSlotModel(SlotModel):
    """Executes plans on a dictionary: tokens by page and offset; of states, the tokens that the state stands for."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        super().__init__(scheduler, seed)
        manager = scheduler.manager
        assert isinstance(manager, GroupedManager)
        self.groups, self.manager = manager.layout.groups, manager
        self.most_units = max(group.units for group in self.groups)

    def step(self, *, finish: float = 0.0) -> StepPlan:  # type: ignore[override]
        plan = self.scheduler.schedule()
        self.digests.append(plan.digest())
        self.execute(plan)
        self.compare_usage(plan)
        report = self.scheduler.commit(plan, self.answer(plan, None, 0.0, finish, 0.0, 1))
        self.finished += report.finished
        self.manager.check()
        self.plans.append(plan)
        return plan

    def execute(self, plan: StepPlan) -> None:
        assert not any(map(len, (plan.copies, plan.stale, plan.swap_in, plan.swap_out)))
        for page in plan.frees:
            self.void(page, 0, self.most_units)
        for row in plan.rows:
            self.read_states(row)
        for row in plan.rows:
            self.write(row)
        for row in plan.rows:
            self.read(row)

    def compare_usage(self, plan: StepPlan) -> None:
        """The slots that hold something are those that the counters name."""
        live = {
            page: index
            for tables in self.manager._tables.values()
            for index in range(len(self.groups))
            for page in tables.pages(index)
        }
        slot = self.manager.layout.slot_bytes
        found = sum(self.groups[live[page]].unit_bytes // slot for page, _ in self.slots if page in live)
        assert found == plan.usage.token, (found, plan.usage)
        cached = sum(1 for page in {page for page, _ in self.slots} if page not in live)
        assert cached == self.manager.pages.cached_pages, (cached, plan.usage)

    @staticmethod
    def tables(row: Row) -> GroupTables:
        assert isinstance(row.table, GroupTables)
        return row.table

    def write(self, row: Row, later: int = 0) -> None:
        tokens, start = self.known(row), row.context_len
        end = start + row.query_len
        for group, table in zip(self.groups, self.tables(row).groups, strict=True):
            if group.kind is GroupKind.state:
                places = range(start // group.block_size, (end - 1) // group.block_size + 1)
                for place in places[-1:] if group.aligned else places:
                    assert table[place] != NO_PAGE
                    upto = min(end, (place + 1) * group.block_size)
                    self.slots[table[place], 0] = self.value(row, tokens, upto - 1)
                continue
            assert len(table) == group.blocks(end), "a block is missing or too many"
            for position in range(start, end):
                slot = (table[position // group.block_size], position % group.block_size)
                assert slot[0] != NO_PAGE
                value = self.value(row, tokens, position)
                assert self.slots.get(slot, value) == value, f"{slot} overwritten while it holds a token"
                self.slots[slot] = value

    def read_states(self, row: Row) -> None:
        tokens = self.known(row)
        for group, table in zip(self.groups, self.tables(row).groups, strict=True):
            if group.kind is GroupKind.state and row.context_len:
                page = table[(row.context_len - 1) // group.block_size]
                assert self.slots.get((page, 0)) == self.value(row, tokens, row.context_len - 1), (
                    "wrong state"
                )

    def read(self, row: Row) -> None:
        tokens = self.known(row)
        for group, table in zip(self.groups, self.tables(row).groups, strict=True):
            if group.kind is GroupKind.state:
                continue
            first = 0 if group.window is None else max(0, row.context_len - group.window + 1)
            for position in range(first, row.context_len + row.query_len):
                slot = (table[position // group.block_size], position % group.block_size)
                assert self.slots.get(slot) == self.value(row, tokens, position), f"{slot} at {position}"


class GroupDriver:
    """Submits, steps and aborts at random; every step is checked."""

    def __init__(self, setup: GroupSetup, seed: int = 0) -> None:
        self.setup = setup
        self.manager = setup.manager()
        self.model = GroupSlotModel(Scheduler(self.manager, setup.limits()), seed)
        self.scheduler = self.model.scheduler
        self.random = random.Random(seed)
        self.submitted = self.refused = 0
        self.aborted: set[int] = set()

    def submit(self, shared: int, unique: int, output: int, prefix: int = 0, priority: int = 0) -> None:
        rid = self.submitted
        self.submitted += 1
        prompt = [
            *range(100 * prefix, 100 * prefix + shared),
            *range(1000 * (rid + 1), 1000 * (rid + 1) + unique),
        ]
        request = Request(
            rid, len(prompt), output, identity=TokenIdentity(rid, np.array(prompt)), priority=priority
        )
        try:
            self.model.submit(request, prompt)
        except NeverFitsError:
            self.refused += 1
            self.aborted.add(rid)

    def abort(self, rid: int) -> None:
        try:
            self.scheduler.abort(rid)
        except CoreError:
            return
        self.aborted.add(rid)
        self.manager.check()

    def walk(self, operations: int) -> None:
        """So many operations, then everything to its end; the pools must be empty of references then."""
        chance = self.random
        for _ in range(operations):
            dice = chance.random()
            if dice < 0.25:
                shared = chance.choice((0, 8, 12, 16, 20, 24))
                self.submit(
                    shared,
                    chance.randint(0 if shared else 1, 12),
                    chance.randint(1, 14),
                    prefix=chance.randint(0, 1),
                    priority=chance.randint(0, 2),
                )
            elif dice < 0.28 and self.submitted:
                self.abort(chance.randrange(self.submitted))
            elif self.scheduler.has_work:
                self.model.step(finish=0.03)
        steps = 0
        while self.scheduler.has_work:
            self.model.step()
            steps += 1
            assert steps < 20_000, "the scheduler does not come to an end"
        assert self.manager.pages.live_pages == 0
        assert sorted([*self.model.finished, *self.aborted]) == list(range(self.submitted))
        self.manager.reset_prefix_cache()
        self.manager.check()
