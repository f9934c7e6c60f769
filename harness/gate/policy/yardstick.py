"""The loop that the policy's speed is measured by. Never change it: every baseline is a multiple of its time.

It does in fixed numbers what the policy does: attribute and method calls, list and dictionary work, integers, small
arrays. A faster machine or a busier one then moves both alike; what is left is the policy's own work.
"""

import numpy as np

ROUNDS = 800


class _Item:
    __slots__ = ("count", "name", "table")

    def __init__(self, name: int) -> None:
        self.name = name
        self.count = 0
        self.table: list[int] = []

    def grow(self, value: int) -> int:
        self.count += 1
        self.table.append(value)
        return self.count % 16


def reference_loop() -> int:
    """A checksum, so that nothing of it can be left out."""
    items = [_Item(name) for name in range(64)]
    index: dict[int, _Item] = {}
    free = list(range(4096))
    total = 0
    for step in range(ROUNDS):
        for item in items:
            if item.grow(step) == 0:
                index[free.pop()] = item
        lengths = np.fromiter((item.count for item in items), dtype=np.int64, count=len(items))
        total += int((lengths // 16).sum()) + len(index)
        if step % 16 == 15:
            free.extend(sorted(index, key=lambda block: index[block].name))
            index.clear()
    return total
