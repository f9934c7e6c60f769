"""Compile a kernel for an architecture that is not there, and read what became of it.

Everything used comes with Triton: its compiler, and ptxas, cuobjdump and nvdisasm in its NVIDIA backend.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.errors import UserError
from harness.gate.resource.sass import count

if TYPE_CHECKING:
    from paged_kernels.configuration import KernelConfiguration

_BUFFER = re.compile(
    r"local_alloc : \(\) -> !ttg\.memdesc<(?P<depth>\d+)x(?P<keys>\d+)x(?P<width>\d+)x[^>]*mutable>"
)
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    `depth` is the number of tiles that each K and V buffer holds (the smaller of the two): 2 or more means that the
    next tile loads while this one is worked on; 0 means that no tile is staged in shared memory.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    depth: int
    instructions: int
    wide_loads: int
    narrow_loads: int
    local: int
    hmma: int
    hgmma: int


def refuse_interpreter() -> None:
    """Kernels that were decorated for the interpreter cannot be compiled.

    Raises:
        UserError: TRITON_INTERPRET is set.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("the resource gate compiles kernels; unset TRITON_INTERPRET")


def resources(configuration: "KernelConfiguration", capability: int) -> Resources:
    """Compile for compute capability `capability` (80, 90) and measure.

    Raises:
        RuntimeError: the compiler refused it; the message is the compiler's.
    """
    built = compiled(configuration, capability)
    with tempfile.TemporaryDirectory(prefix="pagetwin-gate-") as folder:
        log = _assemble(built.asm["ptx"], capability, Path(folder))
        code = count(_disassemble(built.asm["cubin"], Path(folder)))
    spills, registers = _SPILLS.search(log), _REGISTERS.search(log)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas did not report registers and spills:\n{log}")
    return Resources(
        registers=int(registers[1]),
        stack_bytes=int(spills[1]),
        spill_bytes=int(spills[2]) + int(spills[3]),
        shared_bytes=int(built.metadata.shared),
        depth=pipeline_depth(built.asm["ttgir"], configuration.kv_tile),
        instructions=code.total,
        wide_loads=code.wide_loads,
        narrow_loads=code.narrow_loads,
        local=code.local,
        hmma=code.hmma,
        hgmma=code.hgmma,
    )


def compiled(configuration: "KernelConfiguration", capability: int) -> Any:
    """Triton's compiled kernel, with the facts that make loads wide: which arguments are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    source = ASTSource(
        fn=configuration.kernel,
        signature=dict(configuration.signature),
        constexprs=configuration.fixed,
        attrs=configuration.facts,
    )
    target = GPUTarget("cuda", capability, 32)
    return compile(source, target=target, options=configuration.options)


def pipeline_depth(ttgir: str, kv_tile: tuple[int, int] | None) -> int:
    """Tiles per K or V buffer, the smaller, from Triton's GPU dialect; 0 where none is staged."""
    found = [tuple(map(int, shape)) for shape in _BUFFER.findall(ttgir)]
    return min((depth for depth, *tile in found if tuple(tile) == kv_tile), default=0)


def _assemble(ptx: str, capability: int, folder: Path) -> str:
    """What the assembler that Triton itself used says about registers and spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = _TARGET.search(ptx)
    file = folder / "kernel.ptx"
    file.write_text(ptx, encoding="utf-8")
    arch = target[1] if target else f"sm_{capability}"
    return _run(
        get_ptxas(capability).path, "-v", f"--gpu-name={arch}", str(file), "-o", str(folder / "kernel.o")
    )


def _disassemble(cubin: bytes, folder: Path) -> str:
    import triton.backends.nvidia.compiler as backend

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return _run(str(Path(backend.__file__).parent / "bin" / "nvdisasm"), "-c", "-ndf", str(file))


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]} failed:\n{done.stderr or done.stdout}")
    return done.stdout + done.stderr
