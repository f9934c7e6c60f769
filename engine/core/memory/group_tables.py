"""Block tables of one sequence in every group of layers, the keys of its blocks, and what a lookup found."""

from collections.abc import Sequence
from typing import overload

from engine.core.errors import InvariantError
from engine.core.identity import BlockHash, BlockIdentity
from engine.core.memory.group_layout import KVGroup
from engine.core.memory.group_pages import GroupKey
from engine.core.sequence import SequenceState

NO_PAGE = 0
"""In a block table: a block that is not held, because its window has left it or a hit did not need it."""


class GroupTables(Sequence[int]):
    """The block tables of one sequence, one for each group; as a sequence of integers, one after the other.

    Entry i of a group's table is the page of tokens i x block_size and following, or NO_PAGE. `held` is the first
    entry of each table that may be a page, `hits` and `cached` say how many leading blocks came from the prefix cache
    and how many are in it. Below `due` computed tokens the next token needs no page and leaves none behind.
    """

    __slots__ = ("cached", "due", "groups", "held", "hits", "keys")

    def __init__(self, groups: list[list[int]], hits: list[int], keys: "GroupKeys | None") -> None:
        self.groups = groups
        self.held = [0] * len(groups)
        self.due = 0
        self.hits, self.cached = hits, list(hits)
        self.keys = keys

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [page for table in self.groups for page in table][index]

    def pages(self, group: int) -> list[int]:
        """The pages that a group holds, in order."""
        return self.groups[group][self.held[group] :]


class GroupKeys(Sequence[BlockHash]):
    """The keys of a request's blocks in every group. As a sequence: the public hashes of its first group.

    Blocks of the prompt that others may have are keyed by their hash, all others by a number of this request alone.
    """

    def __init__(self, identity: BlockIdentity, groups: Sequence[KVGroup], number: int) -> None:
        self._sizes = [group.block_size for group in groups]
        self._public = {size: identity.prompt_hashes(size) for size in set(self._sizes)}
        self._number = number
        self._keys: list[list[GroupKey]] = [[] for _ in groups]

    def __len__(self) -> int:
        return len(self._public[self._sizes[0]])

    def __getitem__(self, index: int | slice) -> BlockHash | Sequence[BlockHash]:  # type: ignore[override]
        return self._public[self._sizes[0]][index]

    def upto(self, group: int, blocks: int) -> list[GroupKey]:
        """The keys of a group's leading blocks: at least the first `blocks`. Do not change the list."""
        keys = self._keys[group]
        if len(keys) < blocks:
            public = self._public[self._sizes[group]]
            for index in range(len(keys), blocks):
                keys.append((group, public[index] if index < len(public) else (self._number, index)))
        return keys


class PrefixHit(Sequence[int]):
    """A hit of whole match units: `pages` has for each group the leading blocks that it needs, the others NO_PAGE.

    As a sequence it has one entry for each match unit, their numbers.
    """

    def __init__(self, units: int, pages: Sequence[list[int]]) -> None:
        self.units, self.pages = units, pages

    def __len__(self) -> int:
        return self.units

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        return range(self.units)[index]


def check_table(sequence: SequenceState, tables: GroupTables, index: int, group: KVGroup) -> None:
    """Raise InvariantError unless the table has the blocks of its tokens, and those that the next token needs."""
    table, held, computed = tables.groups[index], tables.held[index], sequence.computed
    if len(table) != group.blocks(computed):
        raise InvariantError(f"{sequence}, group {index}: {len(table)} blocks for {computed} tokens")
    if any(table[:held]) or not all(table[held:]):
        raise InvariantError(f"{sequence}, group {index}: the pages do not begin at block {held}: {table}")
    if held > group.skipped(computed):
        raise InvariantError(
            f"{sequence}, group {index}: block {held - 1} was released, and token {computed} sees it"
        )
