"""Launch Triton kernels in the interpreter: the host code stays as it is, and `kernel[grid](...)` runs here.

Triton specialises and compiles as it would for a device of the given capability. Only the launch is replaced: the PTX
is interpreted over the CPU tensors that were passed. Needs a process in which TRITON_INTERPRET was not set.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from ptx.global_memory import GlobalMemory
from ptx.interpreter import Machine
from ptx.program import parse
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SCALARS = {"fp32": np.float32, "i1": np.uint8, "u1": np.uint8}
HIDDEN = 2  # pointers to scratch memory that Triton appends; no kernel of ours uses them


class Driver:
    """What Triton asks of a device before a launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> str:
        return f"interpreted sm_{self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Launches:
    """What ran: the machine of each kernel that was compiled, by the kernel's name and its PTX."""

    def __init__(self, rewrite: Callable[[str, str], str], seed: int) -> None:
        self.rewrite, self.seed = rewrite, seed
        self.machines: dict[tuple[str, str], Machine] = {}

    def machine(self, name: str, text: str) -> Machine:
        """The machine for a kernel's PTX, after the rewrite."""
        if (name, text) not in self.machines:
            self.machines[name, text] = Machine(parse(self.rewrite(name, text)))
        return self.machines[name, text]

    def reached(self, name: str) -> float:
        """The share of a kernel's instructions that have run, over all its compiled forms."""
        runs = [machine.reached for (each, _), machine in self.machines.items() if each == name]
        return float(np.concatenate(runs).mean())


def unchanged(name: str, text: str) -> str:
    """The rewrite that changes nothing."""
    return text


@contextmanager
def interpreted_launches(
    capability: int = 80, *, rewrite: Callable[[str, str], str] = unchanged, seed: int = 0
) -> Iterator[Launches]:
    """Inside, kernels run in the interpreter. `rewrite(kernel's name, PTX)` gives the PTX that runs.

    `seed` decides what unwritten registers and shared memory hold.
    """
    launches = Launches(rewrite, seed)
    compile_only = triton.JITFunction.run

    def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_only(function, *arguments, grid=grid, warmup=True, **options)
        if not warmup:
            names = {name: value for name, value in options.items() if name in function.signature.parameters}
            bound = function.signature.bind(*arguments, **names)
            bound.apply_defaults()
            _launch(launches, function.__name__, kernel, tuple(grid), dict(bound.arguments))
        return kernel

    with ExitStack() as stack:
        stack.enter_context(patch.object(triton.JITFunction, "run", run))
        for module in ("launch", "decode", "prefill", "cascade"):
            stack.enter_context(
                patch(f"paged_kernels.triton.{module}.capability_of", lambda device: capability)
            )
        stack.enter_context(patch("paged_kernels.backends._no_triton", lambda device: ""))
        before = driver._active
        stack.callback(functools.partial(setattr, driver, "_active", before))
        driver.set_active(Driver(capability))
        yield launches


def _launch(launches: Launches, name: str, kernel: Any, grid: tuple[int, ...], bound: dict[str, Any]) -> None:
    kinds = {key: kind for key, kind in kernel.src.signature.items() if kind != "constexpr"}
    tensors = {key: bound[key] for key in kinds if isinstance(bound[key], torch.Tensor)}
    memory = GlobalMemory(tensors)
    values = [
        np.uint64(memory.address(bound[key])) if key in tensors else _number(bound[key], kind)
        for key, kind in kinds.items()
    ]
    machine = launches.machine(name, kernel.asm["ptx"])
    values += [np.uint64(0)] * HIDDEN
    machine.run(grid, values, memory, shared_bytes=kernel.metadata.shared, seed=launches.seed)
    memory.write_back()


def _number(value: Any, kind: str) -> Any:
    if kind in SCALARS:
        return SCALARS[kind](value)
    return np.int64(value)
