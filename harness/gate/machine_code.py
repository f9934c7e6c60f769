"""Compiling a kernel without a GPU, and reading its machine code with the tools in Triton's NVIDIA backend.

The disassembler takes 0.3 to 0.5 s to start and 30 µs for an instruction, so it lists many kernels at once.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.kernel_speed.sass import Instruction, read_listing, tile_loop

if TYPE_CHECKING:
    from paged_kernels.triton.configurations import KernelConfiguration

_BUFFER = re.compile(
    r"local_alloc : \(\) -> !ttg\.memdesc<(?P<depth>\d+)x(?P<keys>\d+)x(?P<width>\d+)x[^>]*mutable>"
)
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")
_WIDTH = 16  # bytes of an instruction


@dataclass(frozen=True)
class Instructions:
    """Counts of instructions in the machine code of one kernel.

    `wide_loads` and `narrow_loads` are loads from global memory of 16 bytes and of fewer bytes per thread, including
    asynchronous copies to shared memory (LDGSTS). `local` are accesses to local memory, which only spills and arrays
    indexed at run time need. `hmma` and `hgmma` are matrix instructions of a warp and of a warp group (sm_90, sm_100).
    `conversions` (F2F) change the type of one number at a quarter of the usual rate. `loop` is the length of the loop
    that loads tiles of K and V, 0 where none does.
    """

    total: int
    wide_loads: int
    narrow_loads: int
    local: int
    hmma: int
    hgmma: int
    conversions: int = 0
    loop: int = 0


def count(code: Sequence[Instruction]) -> Instructions:
    """Count the instructions of a kernel. The total includes the padding at the end (NOP, BRA to itself)."""
    loads = [one.opcode for one in code if one.opcode.startswith("LDG")]
    wide = sum(".128" in opcode for opcode in loads)
    return Instructions(
        total=len(code),
        wide_loads=wide,
        narrow_loads=len(loads) - wide,
        local=sum(one.name in ("LDL", "STL") for one in code),
        hmma=sum(one.opcode.startswith("HMMA") for one in code),
        hgmma=sum(one.opcode.startswith(("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")) for one in code),
        conversions=sum(one.name == "F2F" for one in code),
        loop=len(tile_loop(code)),
    )


@dataclass(frozen=True)
class Built:
    """A compiled kernel: its machine code, registers of a thread, bytes of stack and of shared memory, staged tiles."""

    code: bytes
    registers: int
    stack_bytes: int
    shared_bytes: int
    depth: int


def built(configuration: "KernelConfiguration", capability: int) -> Built:
    """Compile for compute capability `capability` (such as 90).

    Raises:
        RuntimeError: a tool failed. Errors of the compiler keep their own types.
    """
    kernel = compiled(configuration, capability)
    cubin: bytes = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(prefix="pagetwin-gate-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _USAGE.search(_tool("cuobjdump", "-res-usage", file.name))
    if usage is None:
        raise RuntimeError("cuobjdump did not report registers and stack")
    return Built(
        code=text_section(cubin),
        registers=int(usage["registers"]),
        stack_bytes=int(usage["stack"]),
        shared_bytes=int(kernel.metadata.shared),
        depth=pipeline_depth(kernel.asm["ttgir"], configuration.kv_tile),
    )


def compiled(configuration: "KernelConfiguration", capability: int) -> Any:
    """Triton's compiled kernel. The compiler is told which arguments are multiples of 16, which makes loads wide."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    return compile(
        configuration.source, target=GPUTarget("cuda", capability, 32), options=configuration.options
    )


def pipeline_depth(ttgir: str, kv_tile: tuple[int, int] | None) -> int:
    """Tiles in the K or V buffer (the smaller number), from Triton's GPU dialect; 0 where no tile is staged."""
    found = [tuple(map(int, shape)) for shape in _BUFFER.findall(ttgir)]
    return min((depth for depth, *tile in found if tuple(tile) == kv_tile), default=0)


def text_section(cubin: bytes) -> bytes:
    """The machine code of the only kernel in a cubin, which is a 64-bit ELF file.

    Raises:
        RuntimeError: the file does not hold exactly one kernel.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<HHH", cubin, 58)
    # of a section: place of the name, place of the content, length of the content
    sections = [struct.unpack_from("<I20xQQ", cubin, headers + size * index) for index in range(number)]
    found = [
        cubin[start : start + length]
        for name, start, length in sections
        if cubin.startswith(b".text.", sections[names][1] + name)
    ]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} kernels in a cubin; expected 1")
    return found[0]


def listed(codes: Sequence[bytes], capability: int) -> Iterator[tuple[Instruction, ...]]:
    """The instructions of several kernels of one architecture, from one run of the disassembler.

    Targets of branches are places within the kernel, as `read_listing` gives them for a kernel alone.
    """
    with tempfile.NamedTemporaryFile(prefix="pagetwin-gate-", suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        # -ndf leaves out the data-flow analysis, which takes a third of the time and does not change the listing
        listing = _tool("nvdisasm", "-ndf", "-hex", "-b", _architecture(capability), file.name)
    code = read_listing(listing)
    ends = list(accumulate(len(one) // _WIDTH for one in codes))
    if len(code) != (ends or [0])[-1]:
        raise RuntimeError(f"nvdisasm listed {len(code)} instructions of {ends[-1]}")
    for start, end in zip([0, *ends], ends, strict=False):
        yield tuple(
            replace(one, target=one.target - start) if one.target >= 0 else one for one in code[start:end]
        )


def _architecture(capability: int) -> str:
    """The disassembler's name; Triton compiles for the variant `a` of sm_90 and newer."""
    return f"SM{capability}a" if capability >= 90 else f"SM{capability}"


def _tool(name: str, *words: str) -> str:
    """The output of a tool in Triton's NVIDIA backend. Raises RuntimeError where it fails."""
    import triton.backends.nvidia.compiler as backend

    program = Path(backend.__file__).parent / "bin" / name
    done = subprocess.run((str(program), *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stderr or done.stdout}")
    return done.stdout
