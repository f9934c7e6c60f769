"""The prefix cache as requests see it: which full blocks enter it, under which hash, and how a lookup finds them."""

from collections.abc import Sequence as Values
from dataclasses import dataclass

from engine.core.identity import BlockName, private_name
from engine.core.memory.block_tables import BlockTables
from engine.core.options import Decoding
from engine.core.request import Request
from engine.core.sequence import Group, Sequence


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """One lookup: how many leading blocks were asked for, how many of them hit, and the first name that missed."""

    request_id: int
    asked_blocks: int
    hit_blocks: int
    missed: BlockName | None


class BlockNaming:
    """Full blocks enter the cache when they are scheduled to be filled: a second request in the same step hits them.

    Blocks that only their own request can have are marked as private; a preempted request remembers where they are.
    Beam hypotheses keep their generated blocks out of the cache: they are replaced too often to be found again.
    `copying`: forks copy everything, so that named blocks may leave all tables of their request.
    """

    def __init__(self, tables: BlockTables, enabled: bool, deduplicate: bool, copying: bool = False) -> None:
        self._copying = copying
        self._tables = tables
        self._pool = tables.pool
        self._size = tables.block_size
        self._enabled = enabled
        self._deduplicate = deduplicate
        self._fresh: dict[Sequence, tuple[int, Values[BlockName]]] = {}  # named in the step under way

    def names(self, request: Request) -> bool:
        """Whether the request takes part in the prefix cache."""
        return self._enabled and request.identity is not None

    # -- lookup --------------------------------------------------------------------------------------------

    def find(self, group: Group, asked: int) -> tuple[list[int], BlockName | None]:
        """Blocks of the longest cached run among the first `asked`, and the first name that missed. A pure query."""
        identity = group.request.identity
        if not self._enabled or identity is None:
            return [], None
        if group.names is None:
            group.names = identity.prompt_names(self._size)
        names = group.names
        if group.generated and group.request.width == 1:
            names = identity.generated_names(0, self._size) or names
        hits = self._pool.find(names[:asked])
        if len(hits) < min(asked, len(names)):
            return hits, names[len(hits)]
        while len(hits) < asked and (found := self._private(group, len(hits))):
            hits.append(found[0])
        return hits, None

    def _private(self, group: Group, index: int) -> list[int]:
        """Blocks that still hold block `index` of a preempted group, the first that was named first."""
        name = private_name(group.request.request_id, 0, index)
        return [block for block in group.trail.get(index, ()) if self._pool.name_of(block) == name]

    def leave_trail(self, group: Group) -> None:
        """The group is preempted: remember the private blocks that follow its first sequence's named ones."""
        root = group.sequences[0]
        for index in range(len(root.names), root.named):
            blocks = self._private(group, index)
            group.trail[index] = blocks if root.table[index] in blocks else [*blocks, root.table[index]]
        if self._copying and self.names(group.request):
            self._leave_originals(group)

    def _leave_originals(self, group: Group) -> None:
        """Blocks of the prompt that only copies are left of: they are cached, and in nobody's table."""
        first = private_name(group.request.request_id, 0, 0)
        mine = range(first, first + group.request.prompt_tokens // self._size)
        for block in range(1, self._pool.num_blocks + 1):
            name = self._pool.name_of(block)
            if isinstance(name, int) and name in mine:
                known = group.trail.setdefault(name - first, [])
                known += [] if block in known else [block]

    def adopt(self, group: Group, root: Sequence, hits: int) -> None:
        """`root` begins with `hits` cached blocks."""
        root.names, root.named = group.names or (), hits

    # -- naming --------------------------------------------------------------------------------------------

    def full(self, sequence: Sequence, blocks: int) -> None:
        """The first `blocks` blocks of `sequence` are full after the step that is being scheduled."""
        first, request = sequence.named, sequence.request
        if blocks <= first or not self._enabled or request.identity is None:
            return
        if request.decoding is Decoding.beam:
            blocks = min(blocks, request.prompt_tokens // self._size)
        names = sequence.names
        if blocks > len(names):
            names = sequence.names = request.identity.generated_names(sequence.branch, self._size) or names
        table, public = sequence.table, min(blocks, len(names))
        if first < public:
            self._pool.name(table[first:public], names[first:public])
            if self._deduplicate:
                self._fresh[sequence] = first, names[first:public]
        private = max(first, public)
        if private < blocks:
            name = private_name(request.request_id, sequence.branch, private)
            self._pool.name_private(table[private:blocks], name)
        sequence.named = max(first, blocks)

    def settle(self, sequence: Sequence) -> None:
        """Name what the sequence filled since it was last touched; it is about to let go of its blocks."""
        self.deduplicate(sequence)
        self.full(sequence, sequence.computed // self._size)

    def recount(self, sequence: Sequence) -> None:
        """How many leading blocks of a new table are in the cache already."""
        named = (self._pool.name_of(block) is None for block in sequence.table)
        sequence.named = next((index for index, missing in enumerate(named) if missing), len(sequence.table))

    def deduplicate(self, sequence: Sequence) -> None:
        """Where another block held first what `sequence` filled in its last step, refer to that one and free our own.

        To be called before the sequence's blocks become sources of copies. Shared blocks stay as they are.
        """
        if sequence not in self._fresh:
            return
        (first, names), table = self._fresh.pop(sequence), self._tables.of(sequence)
        for index, name in zip(
            range(first, sequence.named), names, strict=False
        ):  # a cut may have left fewer
            own, holder = table[index], self._pool.first_holder(name)
            if holder is not None and own != holder and self._pool.references(own) == 1:
                self._tables.books.written += (self._pool.share([holder]) - 1) * self._size
                self._pool.unname([own])
                self._pool.release([own])
                table[index] = holder

    def forget(self, sequence: Sequence) -> None:
        """`sequence` lets go of its blocks."""
        self._fresh.pop(sequence, None)
