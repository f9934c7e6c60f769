"""Branches that come from one another: sharing with copy-on-write, or copies of everything for comparison."""

from collections import defaultdict
from collections.abc import Sequence as Values

from engine.core.manager import check_parents
from engine.core.request import Request
from engine.core.sequence import Sequence
from engine.core.tables import BlockTables


class CopyAtFork:
    """What copy-on-write saves: here every branch owns all of its blocks.

    Children still refer to their parent's blocks, and get copies of them when the request is scheduled next.

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


class BranchSharing:
    """Forks and re-parented beams. `copying` None: blocks are shared until somebody writes."""

    def __init__(self, tables: BlockTables, copying: CopyAtFork | None) -> None:
        self._tables = tables
        self._copying = copying

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Children hold the parent's blocks too."""
        table = self._tables.of(parent)
        for child in children:
            child.names, child.named = parent.names, parent.named
            self._tables.open(child, self._tables.shared(table))
            if self._copying is not None:
                self._copying.owe(child)

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """Branch i holds what branch `parents[i]` held; parents without a child are dropped last."""
        check_parents(branches, parents)
        tables = [self._tables.of(branch) for branch in branches]
        named = [branch.named for branch in branches]
        taken_over: set[int] = set()
        for branch, parent in zip(branches, parents, strict=True):
            branch.named = named[parent]
            if parent not in taken_over:
                branch.table = tables[parent]
                taken_over.add(parent)
                continue
            branch.table = self._tables.shared(tables[parent])
            if self._copying is not None:
                self._copying.owe(branch)
        for index, table in enumerate(tables):
            if index not in taken_over:
                self._tables.drop(table, branches[0].computed)
