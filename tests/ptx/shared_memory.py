"""Shared memory, and what makes the order of accesses to it matter.

Accesses between two barriers belong to one epoch, in which warps run in any order. So an access is a hazard if another
warp touched the same bytes in the same epoch and one of the two wrote. This finds a missing barrier in whatever order
the warps were interpreted.

`cp.async` copies at any time between its issue and the wait for its group. So an access to its bytes in between, by any
warp, is a hazard, and the copied bytes count as written by the copying warp at the wait. Lanes of one warp run in step.
Source: PTX ISA, "Memory Consistency Model" and "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from typing import NamedTuple

import numpy as np
from ptx.program import AccessError, HazardError

BASE = 4096  # address of the first byte: not 0, so that a lost base is noticed
MANY = 63  # more than one warp has read
WARPS = 64


class Copy(NamedTuple):
    """One issued `cp.async`: bytes of [programs, lanes, width] and where they go."""

    place: np.ndarray  # [programs, lanes]
    data: np.ndarray  # uint8 [programs, lanes, width]
    active: np.ndarray  # bool [programs, lanes]

    def of(self, chosen: np.ndarray) -> "Copy":
        """The copies of some programs."""
        return Copy(self.place[chosen], self.data[chosen], self.active[chosen])


class SharedMemory:
    """Shared memory of several programs, each `size` bytes. `grain` is the narrowest access of the kernel."""

    def __init__(self, programs: int, size: int, grain: int, threads: int, rng: np.random.Generator) -> None:
        self.size, self.grain = size, grain
        self._stride = -(-size // 16) * 16
        self._bytes = rng.integers(0, 256, programs * self._stride + 16, dtype=np.uint8)
        grains = len(self._bytes) // grain
        self._written = np.zeros(grains, np.int32)  # epoch * WARPS + warp of the last store
        self._read = np.zeros(grains, np.int32)
        self._pending = np.zeros(grains, bool)
        self._warp = (np.arange(threads, dtype=np.int32) // 32)[None, :]

    def place(self, rows: np.ndarray, address: np.ndarray, width: int, active: np.ndarray) -> np.ndarray:
        """Positions in the array of bytes, [programs, lanes]. Raises `AccessError`."""
        offset = address.astype(np.int64) - BASE
        for good, what in (
            (
                (offset >= 0) & (offset + width <= self.size),
                f"is outside the {self.size} bytes of shared memory",
            ),
            (address % width == 0, "is no multiple of its width"),
        ):
            if not (good | ~active).all():
                program, lane = np.argwhere(~(good | ~active))[0]
                wrong = np.broadcast_to(offset, active.shape)[program, lane]
                raise AccessError(f"shared offset {wrong} of {width} bytes {what} (lane {lane})")
        return np.where(active, offset + rows[:, None] * self._stride, 0)

    def load(
        self,
        rows: np.ndarray,
        address: np.ndarray,
        element: str,
        count: int,
        active: np.ndarray,
        epoch: int,
    ) -> list[np.ndarray]:
        """`count` neighbouring elements of each lane, [programs, lanes] each. Raises `HazardError`."""
        size = np.dtype(element).itemsize
        place = self.place(rows, address, size * count, active)
        touched, code = self._touched(place, size * count, active, epoch)
        self._refuse_pending(touched)
        if np.any((self._written[touched] >= epoch * WARPS) & (self._written[touched] != code)):
            raise HazardError("reads what another warp has written since the last barrier")
        self._note_readers(touched, code, epoch)
        held, first = self._bytes.view(element), place // size
        return [held[first + index] for index in range(count)]

    def store(
        self,
        rows: np.ndarray,
        address: np.ndarray,
        values: list[np.ndarray],
        active: np.ndarray,
        epoch: int,
    ) -> None:
        """Store neighbouring elements of each lane. Raises `HazardError`."""
        size = values[0].itemsize
        place = self.place(rows, address, size * len(values), active)
        touched, code = self._touched(place, size * len(values), active, epoch)
        self._refuse_pending(touched)
        self._refuse_other_warps(touched, code, epoch)
        self._written[touched] = code
        held, first = self._bytes.view(values[0].dtype), place[active] // size
        for index, value in enumerate(values):
            wanted = np.broadcast_to(value, active.shape)[active]
            held[first + index] = wanted
            if np.any(held[first + index] != wanted):
                raise HazardError("two lanes write different values to one place")

    def issue(
        self, rows: np.ndarray, address: np.ndarray, data: np.ndarray, active: np.ndarray, epoch: int
    ) -> Copy:
        """Start an asynchronous copy of `data` [programs, lanes, width]. Raises `HazardError`."""
        place = self.place(rows, address, data.shape[-1], active)
        touched, code = self._touched(place, data.shape[-1], active, epoch)
        self._refuse_pending(touched)
        self._refuse_other_warps(touched, code, epoch)
        self._pending[touched] = True
        return Copy(place, data, active)

    def complete(self, copy: Copy, epoch: int) -> None:
        """The copying warps have waited: the bytes are there for them, and for others behind a barrier."""
        width = copy.data.shape[-1]
        touched, code = self._touched(copy.place, width, copy.active, epoch)
        self._pending[touched] = False
        self._written[touched] = code
        where = copy.place[copy.active][:, None] + np.arange(width)
        self._bytes[where] = copy.data[copy.active]
        if np.any(self._bytes[where] != copy.data[copy.active]):
            raise HazardError("two asynchronous copies write different values to one place")

    def _touched(
        self, place: np.ndarray, width: int, active: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Grains of the active lanes [lanes, grains], and the code of epoch and warp of each [lanes, 1]."""
        first = place[active] // self.grain
        warp = np.broadcast_to(self._warp, active.shape)[active]
        return first[:, None] + np.arange(width // self.grain), (warp + epoch * WARPS)[:, None]

    def _refuse_pending(self, touched: np.ndarray) -> None:
        if self._pending[touched].any():
            raise HazardError("touches bytes of an asynchronous copy for which nothing has waited")

    def _refuse_other_warps(self, touched: np.ndarray, code: np.ndarray, epoch: int) -> None:
        for last, what in ((self._written, "written"), (self._read, "read")):
            before = last[touched]
            if np.any((before >= epoch * WARPS) & (before != code)):
                raise HazardError(f"overwrites what another warp has {what} since the last barrier")

    def _note_readers(self, touched: np.ndarray, code: np.ndarray, epoch: int) -> None:
        before = self._read[touched]
        new = np.where((before >= epoch * WARPS) & (before != code), epoch * WARPS + MANY, code)
        self._read[touched] = new
        others = self._read[touched] != new  # several warps read the same place at once
        self._read[touched[others]] = epoch * WARPS + MANY
