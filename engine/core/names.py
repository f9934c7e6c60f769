"""The prefix cache's index: from the name of a block's content to the blocks that hold it."""

from collections.abc import Hashable, Sequence

BlockName = Hashable
"""Opaque: equal names mean equal K and V. An `int` is private: only its own request can find the block."""

_BRANCH_BITS = 12
_INDEX_BITS = 32


def private_name(request_id: int, branch: int, index: int) -> int:
    """A name that no other request, branch or position in the table can have; those of a table are consecutive."""
    return (((request_id << _BRANCH_BITS) | branch) << _INDEX_BITS) + index


class NameIndex:
    """Several blocks may carry one name; a lookup finds the one that was entered first."""

    def __init__(self) -> None:
        self._first: dict[BlockName, int] = {}
        self._others: dict[BlockName, list[int]] = {}

    def add(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Enter `blocks` under `names`, which differ from each other."""
        if self._first.keys().isdisjoint(names):
            self._first.update(zip(names, blocks, strict=True))
            return
        for name, block in zip(names, blocks, strict=True):
            if self._first.setdefault(name, block) != block:
                self._others.setdefault(name, []).append(block)

    def drop(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Take `blocks` out; a name goes with its last block."""
        first = self._first
        if not self._others:
            for name in names:
                del first[name]
            return
        for name, block in zip(names, blocks, strict=True):
            self._drop_one(name, block)

    def _drop_one(self, name: BlockName, block: int) -> None:
        others = self._others.get(name)
        if others is None:
            del self._first[name]
            return
        if self._first[name] == block:
            self._first[name] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others[name]

    def first(self, name: BlockName) -> int | None:
        """The block that was entered first under `name`, or None."""
        return self._first.get(name)

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Blocks of the longest leading run of `names` that is in the index. A pure query."""
        blocks: list[int] = []
        first = self._first
        for name in names:
            block = first.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def clear(self) -> None:
        """Forget every name."""
        self._first.clear()
        self._others.clear()

    def pairs(self) -> list[tuple[int, BlockName]]:
        """Every (block, name), sorted by block."""
        more = [(block, name) for name, blocks in self._others.items() for block in blocks]
        return sorted(
            [*((block, name) for name, block in self._first.items()), *more], key=lambda pair: pair[0]
        )
