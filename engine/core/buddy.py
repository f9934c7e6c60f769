"""Buddy placement: every run gets a chunk of the next power of two, as the SOSP'23 paper assumes of its baselines.

A pool that is no power of two is carved from its start into descending powers of two, one a binary digit. The paper
states neither this nor a smallest chunk; ours is one slot.
"""

from bisect import bisect_left, insort

from engine.core.errors import CoreError, OutOfBlocksError


class BuddyRuns:
    """Free chunks by size, lowest address first; chunks that were split apart merge again."""

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
        """Slots that a run of `length` takes away: the next power of two."""
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
        """The lowest chunk of the smallest size that fits; raises OutOfBlocksError, with nothing changed, if none."""
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
        """Give a taken run back. Raises CoreError, with nothing changed, at one that was not taken."""
        start = run.start - 1
        if start not in self._taken or self.chunk(len(run)) != self._taken[start]:
            raise CoreError(f"slots {run.start}..{run.stop - 1} are not a taken run")
        size = self._taken.pop(start)
        self.free += size
        while self._remove(size, start ^ size):
            start &= ~size
            size *= 2
        insort(self._free[size], start)

    def _remove(self, size: int, start: int) -> bool:
        """Take the free chunk at `start` out; False if there is none of this size."""
        starts = self._free.get(size, [])
        at = bisect_left(starts, start)
        if at == len(starts) or starts[at] != start:
            return False
        del starts[at]
        return True
