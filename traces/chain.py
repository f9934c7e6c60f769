"""Chained ids: every id keeps one parent and one position over a whole file; checked with little memory.

Ids of public files are dense from 0, so what is known of them stands in arrays: 16 bytes an id.
"""

import numpy as np
import numpy.typing as npt

from traces.errors import RowError

_DENSE = 1 << 26  # ids below it are looked up in arrays, others in a dictionary
_FIRST_SIZE = 1 << 16
Ints = npt.NDArray[np.int64]


class ChainMemory:
    """Parent, position and first line of every id seen. Nothing is remembered of a row or block that is refused."""

    def __init__(self, field: str = "hash_ids", place: str = "line") -> None:
        self._field = field
        self._place = place  # what the numbers given as lines count
        self._parents = np.zeros(_FIRST_SIZE, np.int64)  # parent id + 2; 1: no parent, 0: id not seen
        self._positions = np.zeros(_FIRST_SIZE, np.int32)
        self._lines = np.zeros(_FIRST_SIZE, np.int32)
        self._others: dict[int, tuple[int, int, int]] = {}  # the same for ids that are not dense

    def check_row(self, ids: list[int], line: int) -> None:
        """Check one row's ids and remember them; raises RowError naming the line of the first sight."""
        fresh = []
        parent = -1
        for position, key in enumerate(ids):
            known = self._known(key)
            if known is None:
                fresh.append((key, parent, position))
            elif known[1] != position:
                raise self._unchained(
                    f"id {key} at position {position}, was at {known[1]} at {self._place} {known[2]}"
                )
            elif known[0] != parent:
                found, had = (("none" if name < 0 else str(name)) for name in (parent, known[0]))
                raise self._unchained(
                    f"id {key} has parent {found}, had parent {had} at {self._place} {known[2]}"
                )
            parent = key
        for key, parent, position in fresh:
            self._remember(key, parent, position, line)

    def check_block(self, ids: Ints, starts: Ints, first_line: int) -> bool:
        """Check rows laid end to end (`starts` [rows + 1] into `ids`) and remember them all, or none of them.

        False where a row breaks the rule, repeats an id, or an id is not dense: then each row must be checked alone.
        """
        if not ids.size or int(ids.max()) >= _DENSE or int(ids.min()) < 0:
            return not ids.size
        self._grow(int(ids.max()))
        lengths = np.diff(starts)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(ids.size) - starts[rows]
        parents = np.concatenate([[-1], ids[:-1]]) + 2
        parents[positions == 0] = 1
        first = self._first_sights(ids)
        expected = self._parents[ids], self._positions[ids]
        seen = expected[0] > 0
        agree = (expected[0] == parents) & (expected[1] == positions)
        same = (parents[first] == parents) & (positions[first] == positions)
        if not bool(np.all(np.where(seen, agree, same))):
            return False
        new = np.flatnonzero(~seen & (first == np.arange(ids.size)))
        self._parents[ids[new]] = parents[new]
        self._positions[ids[new]] = positions[new]
        self._lines[ids[new]] = first_line + rows[new]
        return True

    def _first_sights(self, ids: Ints) -> Ints:
        """For each place the first place in the block that holds the same id."""
        _, index, inverse = np.unique(ids, return_index=True, return_inverse=True)
        first: Ints = index[inverse]
        return first

    def _known(self, key: int) -> tuple[int, int, int] | None:
        if key >= _DENSE:
            return self._others.get(key)
        if key >= len(self._parents) or not self._parents[key]:
            return None
        return int(self._parents[key]) - 2, int(self._positions[key]), int(self._lines[key])

    def _remember(self, key: int, parent: int, position: int, line: int) -> None:
        if key >= _DENSE:
            self._others[key] = (parent, position, line)
            return
        self._grow(key)
        self._parents[key], self._positions[key], self._lines[key] = parent + 2, position, line

    def _grow(self, highest: int) -> None:
        size = len(self._parents)
        if highest < size:
            return
        while size <= highest:
            size *= 2
        for name in ("_parents", "_positions", "_lines"):
            old = getattr(self, name)
            larger = np.zeros(size, old.dtype)
            larger[: len(old)] = old
            setattr(self, name, larger)

    def _unchained(self, reason: str) -> RowError:
        return RowError(self._field, f"{reason}: ids are not chained")
