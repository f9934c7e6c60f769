"""In how many parts a decode reads each row's keys: one policy for the engine, benchmarks, static model and gate.

A part is a share of one row's tiles. A kernel computes each part in `programs` programs (KV heads, and chunks of large
groups), of which a GPU runs `seats` at a time. More parts fill the GPU, and whole waves leave none of it idle; but each
part has a start, and a second launch merges them. The policy takes the share with the lowest cost. In bytes that a
multiprocessor could read meanwhile, a wave of programs costs

    reading = programs × tiles of each × bytes of a tile / multiprocessors
    working = (tiles of each + START) × latency       one warp's time, which other programs may hide
    wave    = (reading⁴ + working⁴)^¼                 as in `harness.kernel_speed`: neither hides the other wholly

and the merge MERGE × latency + 2 × the bytes of partial results / multiprocessors. The figures are rounded from the
machine code of the accepted kernels and datasheets (`docs/kernel-speed.md`); nothing was measured.

`plan_kernel` (`paged_kernels.triton.decode`) takes the same steps on the device, where the lengths are that a recorded
graph is replayed with. This module needs numpy alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SPLIT_TOKENS = 256  # keys that a part has at least; merging smaller parts costs more than it gains
MOST_PARTS = 12  # of the longest row, tried one by one; also tried: shares that fill whole waves
WAVES = 2  # of parts beside one of each row: a bound, because the launch must not follow the lengths
START = 2  # tiles that a program's prologue and epilogue last
MERGE = 3  # tiles that the launch of the merge lasts
# Bytes that a multiprocessor reads while one warp computes a tile (about 32 KB), by a word of the device's name and,
# for others, by compute capability: HBM is read in 16,000 to 36,000, GDDR in 4,000 to 7,000.
LATENCY_BYTES = {"A100": 20_000, "H100": 18_000, "H200": 26_000, "B200": 36_000}
LATENCY_BYTES_OF = {80: 20_000, 90: 18_000, 100: 36_000, 103: 36_000}
LATENCY_BYTES_OTHERWISE = 5_000
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.floating]


class Room(NamedTuple):
    """What a decode kernel finds on a device, and what its programs are."""

    multiprocessors: int
    resident: int  # programs of the kernel that a multiprocessor holds at a time
    latency: int  # bytes that a multiprocessor reads while one warp computes a tile
    programs: int  # of one part: KV heads, times the chunks of a group that one program does not hold
    tile: int  # keys
    tile_bytes: int  # of K and V of one KV head
    partial_bytes: int  # of the results of one program, written and read where they are merged

    @property
    def seats(self) -> int:
        """Programs that the device runs at a time."""
        return self.multiprocessors * self.resident

    @property
    def extra(self) -> int:
        """Parts at most, beside one of each row."""
        return -(-WAVES * self.seats // self.programs)

    @property
    def least(self) -> int:
        """Tiles that a part has at least, where its row has as many."""
        return max(1, SPLIT_TOKENS // self.tile)


def latency_bytes(name: str, capability: int) -> int:
    """The `latency` of a device, from its name and 10 × major + minor of its compute capability."""
    known = (size for word, size in LATENCY_BYTES.items() if word in name.upper())
    return next(known, LATENCY_BYTES_OF.get(capability, LATENCY_BYTES_OTHERWISE))


def parts_of_rows(lengths: Sequence[int] | IntArray, room: Room, window: int = 0) -> IntArray:
    """Parts of each row of `lengths` keys, of which a `window` (0: none) hides all but the last ones."""
    keys = np.asarray(lengths, dtype=np.int64)
    tiles = -(-keys // room.tile)
    if window:
        tiles -= np.maximum(keys - window, 0) // room.tile
    return np.asarray(np.maximum(-(-tiles // share_of(tiles, room)), 1))


def one_part(lengths: Sequence[int] | IntArray, room: Room, window: int = 0) -> int | None:
    """1 where every row has one part, which saves the list of parts and the merge; None: the device lists the parts.

    Other numbers are never fixed, because each would be one more kernel to compile.
    """
    return 1 if int(parts_of_rows(lengths, room, window).max(initial=1)) == 1 else None


def share_of(tiles: IntArray, room: Room) -> int:
    """Tiles of a part, for rows with these numbers of tiles: of all shares that are tried, the first of lowest cost."""
    total, longest = int(tiles.sum()), int(tiles.max(initial=0))
    filled = [max(1, room.seats * wave // room.programs) for wave in range(1, WAVES + 1)]
    tried = [-(-longest // parts) for parts in range(1, MOST_PARTS + 1)] + [
        -(-total // each) for each in filled
    ]
    shares = np.maximum(tried, room.least)
    parts = (-(-tiles[:, None] // shares)).sum(0)
    costs = _costs(total, shares, parts, room)
    merged = MERGE * room.latency + 2.0 * (parts * room.programs * room.partial_bytes) / room.multiprocessors
    cut = shares < longest
    costs = np.where(cut, costs + merged, costs)
    # A row without keys, as the padding of a graph, has one part too, which is not among `parts`.
    costs[cut & (parts > np.count_nonzero(tiles) + room.extra)] = np.inf
    return int(shares[np.argmin(costs)])


def _costs(total: int, shares: IntArray, parts: IntArray, room: Room) -> FloatArray:
    """The cost of each share's waves, without the merge: full ones, then the last, in which the longest part counts."""
    programs = parts * room.programs
    full = np.maximum(programs - 1, 0) // room.seats
    mean = total / np.maximum(parts, 1)
    reading = mean * room.tile_bytes / room.multiprocessors
    waves: FloatArray = full * _wave(reading * room.seats, (mean + START) * room.latency)
    last = _wave(reading * (programs - full * room.seats), (shares + START) * float(room.latency))
    return np.add(waves, last)


def _wave(reading: FloatArray, working: FloatArray) -> FloatArray:
    one, other = reading * reading, working * working
    wave: FloatArray = np.sqrt(np.sqrt(one * one + other * other))
    return wave
