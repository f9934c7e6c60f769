"""Counters of caches with groups, and where every byte of their pools goes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.core.errors import InvariantError
from engine.core.memory.group_layout import GroupLayout
from engine.core.options import GroupKind
from engine.core.plan import SlotUsage


class GroupWaste(NamedTuple):
    """The bytes of all pools by what they are, while a step runs; they sum to the pools.

    Of pages that sequences refer to: `token` is needed by a next token (a state, too), `behind_window` is written and
    no longer seen, in a block that is not behind its window as a whole, `duplicate` holds what another such page holds,
    `reserved` will be written, `tail` never will, `padding` is lost to the one page size, `imbalance` to places of
    padding layers. Of the others: `cached` is a prefix to be hit, `external` is free, and of no use to the request at
    the head of the queue because another pool lacks pages, `free` is the rest.
    """

    token: int
    behind_window: int
    duplicate: int
    reserved: int
    tail: int
    padding: int
    imbalance: int
    cached: int
    external: int
    free: int


class GroupUsage(SlotUsage):
    """The slot states of a cache with groups, and the account of each group for the engine's audit.

    `written_units()` returns how often each group has a written token (or state) in the pools, in live and in cached
    pages; a page counts once. It reads the live tables: call it before the next step is scheduled.
    """

    written_units: Callable[[], list[int]]


class GroupCounters:
    """Counters of the live tables: table entries, pages and written units of each group, and what is never filled.

    A unit is a token, or a whole state. Written units include the step that is being scheduled; a shared page counts
    once.
    """

    def __init__(self, layout: GroupLayout) -> None:
        self._groups = layout.groups
        slot = layout.slot_bytes
        self._unit_slots = [group.unit_bytes // slot for group in layout.groups]
        self._lost_slots = [
            (group.page_bytes - group.units * group.unit_bytes) // slot for group in layout.groups
        ]
        self._are_states = [group.kind is GroupKind.state for group in layout.groups]
        self.entries = 0
        self.pages = [0] * len(layout.groups)
        self.written = [0] * len(layout.groups)
        self.unfillable = [0] * len(layout.groups)
        self._unfillable: dict[int, tuple[int, int]] = {}  # page: group, units

    def wrote(self, tokens: int) -> None:
        """Rows write `tokens` tokens in every group; a state page counts as written when it is taken."""
        for index, is_state in enumerate(self._are_states):
            if not is_state:
                self.written[index] += tokens

    def shared(self, index: int, entries: int, revived: int) -> None:
        """A table got `entries` full pages of the cache, of which `revived` had no reference."""
        self.entries += entries
        self.pages[index] += revived
        self.written[index] += revived * self._groups[index].units

    def took(self, index: int, pages: int, last: int, blocks: int, final_tokens: int) -> None:
        """A table got new pages, the last one as its entry number `blocks`, of a sequence of `final_tokens` tokens."""
        self.entries += pages
        self.pages[index] += pages
        if self._are_states[index]:
            self.written[index] += pages
            return
        units = blocks * self._groups[index].block_size - final_tokens
        if units > 0:
            self._unfillable[last] = index, units
            self.unfillable[index] += units

    def dropped(self, index: int, entries: int, gone: Sequence[int], units: int) -> None:
        """A table lost `entries` pages; those of `gone`, with `units` written units, have no reference any more."""
        self.entries -= entries
        self.pages[index] -= len(gone)
        self.written[index] -= units
        if gone and gone[-1] in self._unfillable:
            self.unfillable[index] -= self._unfillable.pop(gone[-1])[1]

    def slots(self) -> tuple[int, int]:
        """Slots that are written, and slots of live pages that never will be."""
        written = sum(map(_product, self.written, self._unit_slots))
        lost = sum(map(_product, self.unfillable, self._unit_slots))
        return written, lost + sum(map(_product, self.pages, self._lost_slots))

    def check(self, entries: int, written: Sequence[int]) -> None:
        """Compare with a recount; raises InvariantError."""
        unfillable = [0] * len(self._groups)
        for index, units in self._unfillable.values():
            unfillable[index] += units
        if (self.entries, self.written, self.unfillable) != (entries, list(written), unfillable):
            raise InvariantError(
                f"table entries, written units, unfillable units: counters {self.entries}, {self.written}, "
                f"{self.unfillable}; tables {entries}, {list(written)}, {unfillable}"
            )


def _product(one: int, other: int) -> int:
    return one * other
