"""Seconds of a decode kernel from its machine code: occupancy, latency, issue slots and bytes, without a fit.

A launch has `items` programs of `tiles` tiles each. At most `seats` = multiprocessors × programs at a time run (as
registers, shared memory and warps allow), so they run in waves. With P, T, E the cycles that one warp takes for
prologue, one tile and epilogue (`replay`), c programs on the busiest multiprocessor and n in all, a wave takes

    reading = n × tiles × tile_bytes / B            B is what reading reaches of the datasheet's bandwidth
    working = P + tiles × max(T, c × pipe) + E      latency of a warp, and the busiest pipe of the multiprocessor
    wave = (reading^4 + working^4)^(1/4)            near their balance neither hides the other

and a launch L + the sum over waves + P where bytes limit all of them, and the bytes of partial results, written and
read once, over B. `pipe` is the largest of: instructions issued by a scheduler, its integer, special
and matrix pipes (warps / 4 of them share a scheduler), and cycles of shared memory. Little's law is in T: with d
tiles on their way, T is at least (latency of the memory) / d.

Left out, so that a prediction is mostly too fast: how DRAM and TLBs react to the order of blocks, queueing near
the full bandwidth, warps that wait for slower ones, bank conflicts, the instruction cache, clocks below boost, and what
an engine launches beside the kernel. The L2 cache is left out too: KV that was just read and fits it is read faster.
`wave` has the form of the dense layers of the roofline, taken over from there and not fitted here.
"""

from dataclasses import dataclass
from math import ceil

from harness.kernel_speed.gpus import (
    MULTIPROCESSORS,
    REGISTERS,
    RESERVED,
    SCHEDULERS,
    WARP,
    Gpu,
)
from harness.kernel_speed.replay import Replay

LAUNCH_S = 2.0e-6  # from one kernel of a graph to the next: NVIDIA's blog on CUDA graphs gives 1.5 to 2.5 us


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: registers of a thread, shared memory in bytes, warps, one replayed warp."""

    registers: int
    shared_bytes: int
    warps: int
    replay: Replay

    @property
    def tile_bytes(self) -> int:
        """Bytes that a program copies in a round of its loop."""
        return self.replay.copied * self.warps

    def seats(self, capability: int) -> int:
        """Programs that a multiprocessor holds; 0 where not even one fits."""
        limits = MULTIPROCESSORS[capability]
        # registers are given to warps in units of 256, shared memory in units of 128 bytes
        per_warp = ceil(self.registers * WARP / 256) * 256
        by_registers = REGISTERS // (per_warp * self.warps)
        by_shared = limits.shared_bytes // (ceil(self.shared_bytes / 128) * 128 + RESERVED)
        return min(by_registers, by_shared, limits.warps // self.warps, limits.programs)

    def in_flight(self, capability: int) -> float:
        """Bytes of K and V that a multiprocessor has on their way while all its programs wait."""
        return self.seats(capability) * self.replay.ahead * self.tile_bytes

    def pipe(self, programs: int) -> float:
        """Cycles that the busiest pipe of a multiprocessor takes for one tile of each of its programs."""
        warps = programs * self.warps
        per_scheduler = ceil(warps / SCHEDULERS) * self.replay.pipe
        return max(per_scheduler, warps * self.replay.shared)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a launch, and what limits it: `bytes`, `latency` (of one warp) or `pipes`."""

    seconds: float
    limit: str
    waves: int

    def share(self, size: float, gpu: Gpu) -> float:
        """The share of the datasheet's bandwidth at which `size` bytes are read."""
        return size / self.seconds / gpu.bandwidth


def predict(
    kernel: Kernel, gpu: Gpu, items: int, tiles: float, *, launches: int = 1, partial_bytes: float = 0.0
) -> Prediction:
    """The time of `items` programs of `tiles` tiles each.

    `partial_bytes` are written by all programs together and read again by a second launch that merges them.

    Raises:
        ValueError: the kernel does not fit a multiprocessor.
    """
    each = kernel.seats(gpu.capability)
    if each == 0:
        raise ValueError(
            f"{kernel.registers} registers and {kernel.shared_bytes:,} B do not fit sm_{gpu.capability}"
        )
    seats = each * gpu.multiprocessors
    full, rest = divmod(items, seats)
    one = kernel.replay
    cycles, limit = 0.0, "bytes"
    for count, programs in ((full, seats), (1 if rest else 0, rest)):
        if not count:
            continue
        busiest = ceil(programs / gpu.multiprocessors)
        reading = programs * tiles * kernel.tile_bytes / gpu.bytes_per_cycle
        pipe = kernel.pipe(busiest)
        working = one.prologue + tiles * max(one.loop, pipe) + one.epilogue
        if working > reading:
            limit = "pipes" if pipe > one.loop else "latency"
        cycles += count * (reading**4 + working**4) ** 0.25
    cycles += (
        one.prologue if limit == "bytes" else 0.0
    )  # nothing is read before the first addresses are known
    cycles += 2.0 * partial_bytes / gpu.bytes_per_cycle
    return Prediction(launches * LAUNCH_S + cycles / gpu.clock, limit, full + bool(rest))
