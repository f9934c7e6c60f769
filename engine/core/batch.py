"""The rows of a step as arrays: steady decoders from the calendar, the others one by one."""

from collections.abc import Iterator
from collections.abc import Sequence as Table
from typing import overload

import numpy as np

from engine.core.calendar import SteadyRows
from engine.core.plan import ArrayRows, IntArray, Row


def written(table: Table[int], tokens: int) -> Table[int]:
    """A table as an executor sees it: of a reservation, as much as holds `tokens` tokens."""
    return table[:tokens] if isinstance(table, range) else table


class BatchRows(ArrayRows):
    """Steady rows first, then `others`. `now` is the calendar's clock at this step."""

    def __init__(self, steady: SteadyRows, now: int, others: list[Row]) -> None:
        self.others = others
        self._steady = steady
        self._now = now
        self._rows: list[Row] | None = None

    def __len__(self) -> int:
        return len(self._steady.sequences) + len(self.others)

    @property
    def query_len(self) -> IntArray:
        """Query tokens of each row, int64 `[rows]`."""
        ones = np.ones(len(self._steady.sequences), dtype=np.int64)
        return self._with_others(ones, [row.query_len for row in self.others])

    @property
    def context_len(self) -> IntArray:
        """Context tokens of each row before the step, int64 `[rows]`."""
        return self._with_others(self._steady.bases + self._now, [row.context_len for row in self.others])

    def _with_others(self, steady: IntArray, others: list[int]) -> IntArray:
        return np.concatenate([steady, np.array(others, dtype=np.int64)]) if others else steady

    def _laid_out(self) -> list[Row]:
        if self._rows is None:
            contexts = (self._steady.bases + self._now).tolist()
            rows = zip(self._steady.sequences, self._steady.tables, contexts, strict=True)
            steady = [
                Row(s.request.request_id, s.branch, context, 1, True, written(table, context + 1))
                for s, table, context in rows
            ]
            self._rows = [*steady, *self.others]
        return self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._laid_out())

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._laid_out()[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, ArrayRows | list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like a list
