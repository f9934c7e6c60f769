"""Copy at fork: the comparison that shows what copy-on-write saves. Every branch owns all of its blocks."""

from collections import defaultdict

from engine.core.request import Request
from engine.core.sequence import Sequence
from engine.core.tables import BlockTables


class CopyAtFork:
    """Children that still refer to their parent's blocks, and get copies of them when the request is scheduled next.

    A fork is decided when a step is committed; its copies run with the next step, and so their blocks are taken with
    it too: until then nobody writes.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._owed: defaultdict[int, list[Sequence]] = defaultdict(list)

    def owe(self, child: Sequence) -> None:
        """`child` refers to blocks of another branch."""
        self._owed[child.request.request_id].append(child)

    def need(self, request: Request) -> int:
        """Blocks that the request's children lack."""
        owed = self._owed.get(request.request_id, ())
        return sum(len(child.table) for child in owed)

    def settle(self, request: Request) -> int:
        """Give all of them copies; returns how many blocks that took."""
        taken = 0
        for child in self._owed.pop(request.request_id, ()):
            table = self._tables.of(child)
            copies = self._tables.copied(request, table, child.computed)
            self._tables.drop(table, child.computed)
            child.table = copies
            taken += len(copies)
        return taken

    def forget(self, sequence: Sequence) -> None:
        """`sequence` lets go of its blocks: nothing is owed to it any more."""
        owed = self._owed.get(sequence.request.request_id, [])
        if sequence in owed:
            owed.remove(sequence)
