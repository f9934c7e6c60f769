"""Groups of layers as the compiled replay takes them, and the account of their bytes that it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_pages import held_bytes, waste_of
from engine.core.options import GroupKind, GroupPages, WindowHits
from engine.core.plan import SlotUsage
from harness.compiled.state import LayerArrays
from harness.metrics.log import COLUMN, WASTE_COLUMNS, IntArray
from harness.replay.arrivals import LATEST_NS, NEVER, to_s


@dataclass(frozen=True)
class Grouping:
    """Layers in groups, whose pages one pool has; `rule` and `interval` as `PagedManager.of` takes them."""

    layout: GroupLayout
    rule: WindowHits = WindowHits.window
    interval: int | None = 0

    def obstacle(self) -> str | None:
        """Why the compiled replay does not have such groups; None where it does."""
        groups = self.layout.groups
        if self.layout.pages is not GroupPages.uniform:
            return f"groups have pages of their own ({self.layout.pages})"
        if any(group.kind is GroupKind.state for group in groups):
            return "layers keep states"
        if any(group.block_size != groups[0].block_size for group in groups):
            return "blocks of groups differ in length"
        if any(group.keeps == 1 for group in groups):
            return "a window sees one token"
        return None

    def layers(self) -> LayerArrays:
        """The groups as arrays."""
        groups = self.layout.groups
        whole = [group.hits_whole(self.rule) for group in groups]
        first = groups[whole.index(True) if True in whole else 0]
        slot = self.layout.slot_bytes
        return LayerArrays(
            window=_numbers([group.keeps for group in groups]),
            chunk=_numbers([group.window if group.kind is GroupKind.chunk else None for group in groups]),
            needed=_numbers([group.hit_blocks(self.rule) for group in groups]),
            whole=_numbers(list(map(int, whole))),
            like_first=_numbers([int(group.keeps_as(first)) for group in groups]),
            token_slots=_numbers([group.unit_bytes // slot for group in groups]),
            lost_slots=_numbers(
                [(group.page_bytes - group.units * group.unit_bytes) // slot for group in groups]
            ),
        )

    def most_blocks(self, tokens: IntArray, chunk: int) -> IntArray:
        """The most pages that requests of so many tokens hold at once (`KVGroup.most_blocks`)."""
        size, most = self.layout.match_unit, np.zeros_like(tokens)
        for group in self.layout.groups:
            # as many as those of the longest request, if it has so many tokens
            most += np.minimum(-(-tokens // size), group.most_blocks(LATEST_NS, chunk))
        return most


class Waste:
    """Where the bytes of the pages go, as `harness.replay.memory.Wastes` and `WasteTimes` have it."""

    def __init__(self, grouping: Grouping) -> None:
        self._layout = grouping.layout
        self._tables: list[IntArray] = []
        self._times = np.zeros(len(WASTE_COLUMNS))

    def add(self, steps: IntArray, logged: IntArray, *, keeps_rows: bool) -> None:
        """More steps: their records, and `StepLog.waste`."""
        behind, copies, live = logged.transpose(2, 1, 0)
        states: Any = (steps[:, getattr(COLUMN, name)] for name in SlotUsage._fields)
        waste = waste_of(self._layout, SlotUsage(*states), behind, copies, live)
        if keeps_rows:
            self._tables.append(np.array([*waste, *held_bytes(self._layout, live)]))
            return
        weighed = np.array(waste).T * to_s(steps[:, COLUMN.ns])[:, None]
        self._times = np.add.accumulate([self._times, *weighed])[-1]  # in order of time, as the core adds

    def value(self, *, keeps_rows: bool) -> dict[str, Any]:
        """Bytes of each step by column, or bytes times seconds."""
        if not keeps_rows:
            return dict(zip(WASTE_COLUMNS, self._times.tolist(), strict=True))
        names = [*WASTE_COLUMNS, *(f"group_{group}" for group in range(len(self._layout.groups)))]
        return dict(zip(names, np.concatenate(self._tables, axis=1), strict=True))


def no_layers() -> LayerArrays:
    """Of a plain model."""
    return LayerArrays(*(_numbers([]) for _ in LayerArrays._fields))


def _numbers(values: Sequence[int | None]) -> IntArray:
    return np.array([NEVER if value is None else value for value in values], dtype=np.int64)
