"""Figures of GPUs that the static model takes as given, each with its source. None was measured by us.

Latencies: clock cycles of pointer chases in github.com/RRZE-HPC/gpu-benches (gpu-latency, commit 1038c5d: A100 80 GB,
L40, GH200) for L2 and memory; Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv
2402.13499) for shared memory, within 10 % of Jia et al. on Volta (arXiv 1804.06826) and Abdelkhalik et al. on Ampere
(arXiv 2208.11174), which give the arithmetic pipes, shuffles and matrix instructions.
No such table was found for sm_86, sm_100 and sm_120. They take sm_89's and sm_90's figures, a guess.

Shares of the datasheet's bandwidth that reading reaches: gpu-stream in the same repository, the best `read` of A100
80 GB (1,776 of 2,039 GB/s), A100 40 GB (1,500 of 1,555), L40 (845 of 864); best `triad` of GH200 (3,783 of 4,000;
its `read` has too few bytes on their way), which H100, H200 and B200 take over; RTX 4090 921.9 of 1,008 GB/s
(github.com/xytpai/nvbench), which A10G and RTX PRO 6000 take over.

Multiprocessors, boost clocks, L2 and bandwidths: NVIDIA's white papers and datasheets (Ampere GA100, Hopper, Ada, RTX
Blackwell PRO, Blackwell). Registers, shared memory and warps of a multiprocessor: CUDA C++ Programming Guide,
Technical Specifications per Compute Capability.
"""

from dataclasses import dataclass

SCHEDULERS = 4  # of a multiprocessor, each issuing at most one instruction a cycle
REGISTERS = 65_536
WARP = 32


@dataclass(frozen=True)
class Latencies:
    """Cycles until a result is there, of what has no fixed latency in the code, and cycles that a pipe is taken.

    `matrix` are cycles of one HMMA 16x8x16 in the matrix unit of a scheduler; `warp_group` multiply-adds a cycle of
    the matrix units of a multiprocessor, for instructions of a warp group (0: there are none).
    """

    memory: int
    l2: int
    shared: int
    matrix: int
    warp_group: int
    constant: int = 40  # LDC and S2R, which are rare and not on the critical path
    shuffle: int = 24
    special: int = 24  # MUFU, and conversions through the same pipe
    uniform: int = 12  # R2UR and other moves between the uniform and the vector path
    barrier: int = 20  # BAR.SYNC where all warps arrive together
    operands: int = 12  # until an instruction with a scoreboard has read its operands


AMPERE = Latencies(memory=552, l2=246, shared=29, matrix=8, warp_group=0)
AMPERE_GRAPHICS = Latencies(memory=625, l2=274, shared=30, matrix=16, warp_group=0)
HOPPER = Latencies(memory=688, l2=280, shared=29, matrix=8, warp_group=2048)
LATENCIES = {80: AMPERE, 90: HOPPER, 100: HOPPER} | dict.fromkeys((86, 89, 120), AMPERE_GRAPHICS)


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs of a multiprocessor share: shared memory in bytes, warps, programs."""

    shared_bytes: int
    warps: int
    programs: int


MULTIPROCESSORS = {
    80: Multiprocessor(167_936, 64, 32),
    86: Multiprocessor(102_400, 48, 16),
    89: Multiprocessor(102_400, 48, 24),
    90: Multiprocessor(233_472, 64, 32),
    100: Multiprocessor(233_472, 64, 32),
    120: Multiprocessor(102_400, 48, 24),
}
RESERVED = 1024  # bytes of shared memory that the system takes for each program


@dataclass(frozen=True)
class Gpu:
    """A GPU: compute capability, multiprocessors, boost clock in Hz, bandwidth in bytes/s and the share reached."""

    name: str
    capability: int
    multiprocessors: int
    clock: float
    bandwidth: float
    reached: float

    @property
    def latencies(self) -> Latencies:
        """The cycles of its architecture."""
        return LATENCIES[self.capability]

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes of memory per cycle that reading reaches, of the whole GPU."""
        return self.bandwidth * self.reached / self.clock


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100_80gb", 80, 108, 1.410e9, 2039e9, 0.871),
        Gpu("a100_40gb", 80, 108, 1.410e9, 1555e9, 0.965),
        Gpu("a10g", 86, 80, 1.710e9, 600e9, 0.915),
        Gpu("l40s", 89, 142, 2.520e9, 864e9, 0.978),
        Gpu("rtx4090", 89, 128, 2.520e9, 1008e9, 0.915),
        Gpu("h100", 90, 132, 1.980e9, 3350e9, 0.946),
        Gpu("h200", 90, 132, 1.980e9, 4800e9, 0.946),
        Gpu("b200", 100, 148, 1.965e9, 8000e9, 0.946),
        Gpu("rtx_pro_6000", 120, 188, 2.617e9, 1792e9, 0.915),
    )
}
