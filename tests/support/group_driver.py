"""Caches with groups for `core_driver`, beside a model that stores what every slot and state depends on."""

from collections import Counter
from dataclasses import dataclass, replace

from slot_model import SlotModel

from engine.core.memory.block_pool import NULL_BLOCK
from engine.core.memory.block_tables import GroupTables
from engine.core.memory.group_chunks import pages_of
from engine.core.memory.group_layout import GroupLayout, LayerSet, separate_layout, uniform_layout
from engine.core.memory.paged import PagedManager, layer_groups
from engine.core.options import (
    GroupKind,
    GroupPages,
    Preemption,
    Retention,
    SchedulerLimits,
    Scheduling,
    StateMode,
    WindowHits,
)
from engine.core.plan import Row, StepPlan
from engine.core.scheduling.scheduler import Scheduler

FULL = LayerSet(GroupKind.full, 2, 8)
WINDOW = LayerSet(GroupKind.window, 4, 8, window=7)
SHORT = LayerSet(GroupKind.window, 3, 4, window=3)
CHUNK = LayerSet(GroupKind.chunk, 4, 8, window=8)
LATENT = LayerSet(GroupKind.latent, 2, 8)
STATE = LayerSet(GroupKind.state, 3, 24)


@dataclass(frozen=True)
class GroupSetup:
    """A model's layers, and one choice of every policy."""

    sets: tuple[LayerSet, ...] = (FULL, WINDOW)
    pages: GroupPages = GroupPages.uniform
    size: int = 4
    state_every: int | None = None
    memory: int = 4800  # bytes
    budget: int = 24
    running: int = 12
    caching: bool = True
    hits: WindowHits = WindowHits.window
    interval: int | None = 0
    states: StateMode = StateMode.align
    unit: int | None = None
    behind_first: bool = False
    retention: Retention = Retention.lru
    scheduling: Scheduling = Scheduling.fcfs
    preemption: Preemption = Preemption.recompute
    host: int = 0  # bytes
    whole: bool = False
    longest: int = 64

    def layout(self) -> GroupLayout:
        if self.pages is GroupPages.uniform:
            return replace(uniform_layout(self.sets, self.size, self.states), unit=self.unit)
        return separate_layout(
            self.sets, self.size, state_every=self.state_every, pages=self.pages, states=self.states
        )

    def manager(self) -> PagedManager:
        layout = self.layout()
        counts = layout.page_counts(self.memory, self.longest, self.budget)
        return PagedManager.of(
            pages_of(layout, counts, retention=self.retention, behind_first=self.behind_first),
            most_chunk=self.budget,
            prefix_caching=self.caching,
            window_hits=self.hits,
            retention_interval=self.interval,
            host_slots=self.host // layout.slot_bytes,
        )

    def model(self, seed: int) -> "GroupSlotModel":
        return GroupSlotModel(Scheduler(self.manager(), self.limits()), seed)

    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            self.budget,
            self.running,
            max_model_len=self.longest,
            policy=self.scheduling,
            preemption=self.preemption,
            admit_whole_prompt=self.whole,
        )


class GroupSlotModel(SlotModel):
    """Executes plans on a dictionary: tokens by page and offset; of states, the tokens that the state stands for."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        super().__init__(scheduler, seed)
        found = layer_groups(scheduler.manager)
        assert found is not None
        self.pages, self.caches = found.pages, scheduler.manager.caches
        self.slot_bytes, self.groups = found.layout.slot_bytes, found.layout.groups
        self.size = max(group.units for group in self.groups)

    def compare_usage(self, plan: StepPlan) -> None:
        live = {
            page: index
            for index, cache in enumerate(self.caches)
            for part in cache.tables.live
            for page in filter(None, part.table)
        }
        found = sum(
            self.groups[live[page]].unit_bytes // self.slot_bytes for page, _ in self.slots if page in live
        )
        assert found == plan.usage.token, (found, plan.usage)
        of_group = Counter(live[page] if page in live else self.group_of(page) for page, _ in self.slots)
        assert [of_group[index] for index in range(len(self.groups))] == plan.usage.written_units()
        cached = {page for page, _ in self.slots} - live.keys()
        assert sum(map(self.pages.page_bytes, cached)) == plan.usage.cached * self.slot_bytes, plan.usage

    def group_of(self, page: int) -> int:
        """The group of a cached page, by its key."""
        pools = (share.pool for share in self.pages.shares)
        return next(pool for pool in pools if page <= pool.offset + pool.num_blocks).hash_of(page)[0]

    @staticmethod
    def tables(row: Row) -> GroupTables:
        assert isinstance(row.table, GroupTables)
        return row.table

    def write(self, row: Row, later: int = 0) -> None:
        tokens, start, request = self.known(row), row.context_len, self.requests[row.request_id]
        end, spare = start + row.query_len, 2 * (request.most_kv_tokens - request.final_kv_tokens)
        assert end <= len(tokens)
        for group, table in zip(self.groups, self.tables(row).groups, strict=True):
            if group.kind is GroupKind.state:
                self.check_state(row, table[(start - 1) // group.block_size] if start else NULL_BLOCK)
                places = range(start // group.block_size, (end - 1) // group.block_size + 1)
                for place in places[-1:] if group.aligned else places:
                    assert table[place] != NULL_BLOCK
                    upto = min(end, (place + 1) * group.block_size)
                    self.slots[table[place], 0] = self.value(row, tokens, upto - 1)
                continue
            assert group.blocks(end) <= len(table) <= group.blocks(end + spare), (
                "a block is missing or too many"
            )
            tail = table[start // group.block_size]
            if tail in self.copied:  # behind it stands what another sequence wrote
                self.void(tail, start % group.block_size, group.block_size)
            for position in range(start, end):
                slot = (table[position // group.block_size], position % group.block_size)
                assert slot[0] != NULL_BLOCK
                value = self.value(row, tokens, position)
                assert self.slots.get(slot, value) == value, f"{slot} overwritten while it holds a token"
                self.slots[slot] = value

    def check_state(self, row: Row, page: int) -> None:
        """A row begins with the state after the token before it; no row that comes earlier has written it."""
        if row.context_len:
            wanted = self.value(row, self.known(row), row.context_len - 1)
            assert self.slots.get((page, 0)) == wanted, "wrong state"

    def read(self, row: Row) -> None:
        tokens = self.known(row)
        for group, table in zip(self.groups, self.tables(row).groups, strict=True):
            if group.kind is GroupKind.state:
                continue
            first = 0 if group.window is None else max(0, row.context_len - group.window + 1)
            if group.kind is GroupKind.chunk:
                first = row.context_len - row.context_len % group.window
            for position in range(first, row.context_len + row.query_len):
                slot = (table[position // group.block_size], position % group.block_size)
                assert self.slots.get(slot) == self.value(row, tokens, position), f"{slot} at {position}"
