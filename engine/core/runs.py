"""Free runs of slots, first fit: the lowest hole that is long enough is used, neighbours merge when given back."""

from bisect import bisect_left

from engine.core.errors import CoreError, OutOfBlocksError


class FreeRuns:
    """Holes of a pool with slots 1 … `num_slots`, in address order."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise CoreError(f"a pool needs at least 1 slot, found {num_slots}")
        self._starts = [1]
        self._ends = [num_slots + 1]
        self.free = num_slots

    def holes(self) -> list[range]:
        """The holes in address order."""
        return [range(start, end) for start, end in zip(self._starts, self._ends, strict=True)]

    @staticmethod
    def chunk(length: int) -> int:
        """Slots that a run of `length` takes away: no more than that."""
        return length

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        return sum((end - start) // length for start, end in zip(self._starts, self._ends, strict=True))

    def free_below(self, length: int) -> int:
        """Free slots in holes that are too short for a run of `length`."""
        return sum(len(hole) for hole in self.holes() if len(hole) < length)

    def take(self, length: int) -> range:
        """The first hole's head; raises OutOfBlocksError, with nothing changed, when no hole is long enough."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                self._starts[index] += length
                if self._starts[index] == end:
                    del self._starts[index], self._ends[index]
                self.free -= length
                return range(start, start + length)
        raise OutOfBlocksError(
            f"no hole of {length} slots; {self.free} are free in {len(self._starts)} holes"
        )

    def give(self, run: range) -> None:
        """Give a taken run back."""
        at = bisect_left(self._starts, run.start)
        if (at < len(self._starts) and self._starts[at] < run.stop) or (
            at and self._ends[at - 1] > run.start
        ):
            raise CoreError(f"slots {run.start}..{run.stop - 1} are free already")
        self._starts.insert(at, run.start)
        self._ends.insert(at, run.stop)
        self.free += len(run)
        for left in (at, at - 1):
            if 0 <= left < len(self._starts) - 1 and self._ends[left] == self._starts[left + 1]:
                del self._ends[left], self._starts[left + 1]
