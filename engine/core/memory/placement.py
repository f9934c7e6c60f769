"""Placement of contiguous reservations: free runs of slots, and which of them a reservation takes.

First fit takes the lowest hole that is long enough, and merges neighbours when a run is given back. Buddy gives every
run a chunk of the next power of two, as the SOSP'23 paper assumes for its baselines. The paper does not say how a pool
is cut that is no power of two, nor which chunk is the smallest. Here such a pool is cut into descending powers of two,
one for each binary digit, and the smallest chunk is one slot.
"""

from bisect import bisect_left, insort
from typing import Protocol

from engine.core.errors import CoreError, OutOfBlocksError
from engine.core.options import Placement


class Runs(Protocol):
    """The free runs of a pool with slots 1 … n. A run is a range of consecutive slots."""

    free: int

    def chunk(self, length: int) -> int:
        """How many slots are allocated for a run of `length`."""
        ...

    def holes(self) -> list[range]:
        """Free runs in address order."""
        ...

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        ...

    def free_below(self, length: int) -> int:
        """Free slots in places that are too small for a run of `length`."""
        ...

    def take(self, length: int) -> range:
        """Allocate a run of `length`. Raises OutOfBlocksError, and changes nothing, if there is none."""
        ...

    def give(self, run: range) -> None:
        """Free a run. Raises CoreError if a part of it is free already."""
        ...


def runs_for(placement: Placement, num_slots: int) -> Runs:
    """An empty pool of `num_slots` slots."""
    return BuddyRuns(num_slots) if placement is Placement.buddy else FreeRuns(num_slots)


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
        """How many slots are allocated for a run of `length`: exactly `length`."""
        return length

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        return sum((end - start) // length for start, end in zip(self._starts, self._ends, strict=True))

    def free_below(self, length: int) -> int:
        """Free slots in holes that are too short for a run of `length`."""
        return sum(len(hole) for hole in self.holes() if len(hole) < length)

    def take(self, length: int) -> range:
        """The start of the first hole that is long enough. Raises OutOfBlocksError, and changes nothing, if none is."""
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
        """Free a run. Raises CoreError if a part of it is free already."""
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


class BuddyRuns:
    """Free chunks by size, lowest address first. A freed chunk is merged with its buddy if that is free too."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise CoreError(f"a pool needs at least 1 slot, found {num_slots}")
        self.free = num_slots
        self._free: dict[int, list[int]] = {}
        self._taken: dict[int, int] = {}  # first slot -> chunk size
        offset = 0
        for digit in reversed(range(num_slots.bit_length())):
            self._free[1 << digit] = [offset] if num_slots >> digit & 1 else []
            offset += num_slots & 1 << digit

    @staticmethod
    def chunk(length: int) -> int:
        """How many slots are allocated for a run of `length`: the next power of two."""
        return 1 << (length - 1).bit_length()

    def holes(self) -> list[range]:
        """The free chunks in address order."""
        found = [(start, size) for size, starts in self._free.items() for start in starts]
        return [range(start + 1, start + 1 + size) for start, size in sorted(found)]

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        chunk = self.chunk(length)
        return sum(len(starts) * (size // chunk) for size, starts in self._free.items() if size >= chunk)

    def free_below(self, length: int) -> int:
        """Free slots in chunks that are too small for a run of `length`."""
        chunk = self.chunk(length)
        return sum(len(starts) * size for size, starts in self._free.items() if size < chunk)

    def take(self, length: int) -> range:
        """The lowest chunk of the smallest fitting size. Raises OutOfBlocksError, and changes nothing, if none fits."""
        chunk = self.chunk(length)
        fitting = [size for size, starts in self._free.items() if size >= chunk and starts]
        if not fitting:
            raise OutOfBlocksError(f"no chunk of {chunk} slots for {length}; {self.free} are free")
        size = min(fitting)
        start = self._free[size].pop(0)
        while size > chunk:
            size //= 2
            insort(self._free[size], start + size)
        self._taken[start] = chunk
        self.free -= chunk
        return range(start + 1, start + 1 + length)

    def give(self, run: range) -> None:
        """Free a run. Raises CoreError, and changes nothing, if the run is not allocated."""
        start = run.start - 1
        if start not in self._taken or self.chunk(len(run)) != self._taken[start]:
            raise CoreError(f"slots {run.start}..{run.stop - 1} are not an allocated run")
        size = self._taken.pop(start)
        self.free += size
        while self._remove(size, start ^ size):
            start &= ~size
            size *= 2
        insort(self._free[size], start)

    def _remove(self, size: int, start: int) -> bool:
        """Remove the free chunk at `start`; False if there is none of this size."""
        starts = self._free.get(size, [])
        at = bisect_left(starts, start)
        if at == len(starts) or starts[at] != start:
            return False
        del starts[at]
        return True
