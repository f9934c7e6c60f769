"""Groups of layers as the compiled replay takes them, and the account of their bytes that it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.memory.group_layout import GroupLayout
from engine.core.options import GroupKind, GroupPages, WindowHits
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
        groups = grouping.layout.groups
        self._slot, self._size = grouping.layout.slot_bytes, grouping.layout.match_unit
        fields = ("unit_bytes", "padding", "imbalance", "page_bytes")
        self._of_group = {name: _numbers([getattr(group, name) for group in groups]) for name in fields}
        self._rows: list[IntArray] = []
        self._times = np.zeros(len(WASTE_COLUMNS))

    def add(self, steps: IntArray, logged: IntArray, *, keeps_rows: bool) -> None:
        """More steps: their records, and `StepLog.waste`."""
        table = self._table(steps, logged)
        if keeps_rows:
            self._rows.append(table)
            return
        weighed = table[:, : len(WASTE_COLUMNS)] * to_s(steps[:, COLUMN.ns])[:, None]
        self._times = np.add.accumulate([self._times, *weighed])[-1]  # in order of time, as the core adds

    def value(self, *, keeps_rows: bool) -> dict[str, Any]:
        """Bytes of each step by column, or bytes times seconds."""
        if not keeps_rows:
            return dict(zip(WASTE_COLUMNS, self._times.tolist(), strict=True))
        names = [*WASTE_COLUMNS, *(f"group_{group}" for group in range(len(self._of_group["padding"])))]
        return dict(zip(names, np.concatenate(self._rows).T.copy(), strict=True))

    def _table(self, steps: IntArray, logged: IntArray) -> IntArray:
        behind, copies, live = (logged[:, :, place] for place in range(3))
        of, slots = self._of_group, {name: steps[:, getattr(COLUMN, name)] * self._slot for name in _STATES}
        behind, duplicate = behind @ of["unit_bytes"], copies @ of["unit_bytes"] * self._size
        padding, imbalance = live @ of["padding"], live @ of["imbalance"]
        found = slots | {
            "token": slots["token"] - behind - duplicate,
            "behind_window": behind,
            "duplicate": duplicate,
            "tail": slots["internal"] - padding - imbalance,
            "padding": padding,
            "imbalance": imbalance,
        }
        return np.column_stack([*(found[name] for name in WASTE_COLUMNS), live * of["page_bytes"]])


_STATES = ("token", "cached", "reserved", "internal", "external", "free")


def no_layers() -> LayerArrays:
    """Of a plain model."""
    return LayerArrays(*(_numbers([]) for _ in LayerArrays._fields))


def _numbers(values: Sequence[int | None]) -> IntArray:
    return np.array([NEVER if value is None else value for value in values], dtype=np.int64)
