"""Compile a kernel for an architecture that is not there, and read what became of it.

Everything used comes with Triton: its compiler, and cuobjdump and nvdisasm in its NVIDIA backend.
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
    from paged_kernels.triton.configurations import KernelConfiguration

_BUFFER = re.compile(
    r"local_alloc : \(\) -> !ttg\.memdesc<(?P<depth>\d+)x(?P<keys>\d+)x(?P<width>\d+)x[^>]*mutable>"
)
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    `depth` is the number of tiles that each K and V buffer holds (the smaller of the two): 2 or more means that the
    next tile loads while this one is worked on; 0 means that no tile is staged in shared memory. Spilled registers
    show as a stack and as accesses to local memory.
    """

    registers: int
    stack_bytes: int
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
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(built.asm["cubin"])
        usage = _USAGE.search(_tool("cuobjdump", "-res-usage", str(file)))
        # without its analysis of data flow, which changes nothing in the listing and takes a third of the time
        code = count(_tool("nvdisasm", "-c", "-ndf", str(file)))
    if usage is None:
        raise RuntimeError("cuobjdump did not report registers and stack")
    return Resources(
        registers=int(usage["registers"]),
        stack_bytes=int(usage["stack"]),
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


def _tool(name: str, *words: str) -> str:
    """What one of the tools in Triton's NVIDIA backend prints."""
    import triton.backends.nvidia.compiler as backend

    program = Path(backend.__file__).parent / "bin" / name
    done = subprocess.run((str(program), *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stderr or done.stdout}")
    return done.stdout
