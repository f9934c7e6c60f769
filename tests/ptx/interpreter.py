"""The interpreter: programs (CTAs) of a grid run side by side, instruction by instruction, on NumPy arrays.

All programs of a group stand at the same instruction. At a branch that some take and others do not, the group splits,
and both parts run to their ends; programs do not meet again. If lanes of one program part at a branch, one side runs
after the other, each with its lanes only, until both have reached the place where all paths meet. An instruction that
needs all lanes is refused in between.
"""

from collections.abc import Callable, Sequence

import numpy as np
from ptx import conversions  # noqa: F401  (adds its opcodes)
from ptx.arithmetic import NUMPY, OPERATIONS
from ptx.control_flow import END, meeting_places
from ptx.conversions import halves, pair
from ptx.global_memory import GlobalMemory
from ptx.memory_instructions import memory_step, shared_grain
from ptx.operands import Array, Batch, Group, guard_of, reader, writer
from ptx.program import Instruction, Pack, Program, PtxError, Symbol, UnsupportedError
from ptx.shared_memory import SharedMemory
from ptx.warp_instructions import warp_step

Step = Callable[[Group], Group | None]
TOGETHER = 32  # programs that run side by side
MOST_STEPS = 1_000_000  # instructions of one group; a kernel that takes more does not end


class Machine:
    """A kernel, ready to run. Raises `UnsupportedError` at once if it has an instruction that is not modelled."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Step] = []
        for instruction in program.instructions:
            try:
                self.steps.append(self._step_of(instruction))
            except UnsupportedError as error:
                raise UnsupportedError(f"{program.name} {instruction}: {error}") from None
        self.reached = np.zeros(len(self.steps), bool)  # instructions that any program has run
        self._grain = shared_grain(program)
        self._meeting = meeting_places(program)

    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence[np.ndarray],
        memory: GlobalMemory,
        *,
        shared_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Run all programs of a grid. `arguments` are NumPy numbers, one for each parameter in order.

        `seed` decides the bits in registers and shared memory that nothing has written. Raises a `PtxError` that names
        the instruction.
        """
        across = (*grid, 1, 1)[:3]
        if len(arguments) != len(self.program.parameters):
            raise PtxError(f"{len(arguments)} arguments for {len(self.program.parameters)} parameters")
        bits = {
            name: np.asarray(value).astype(NUMPY[kind]).reshape(1, 1)
            for (name, kind), value in zip(self.program.parameters.items(), arguments, strict=True)
        }
        rng, total = np.random.default_rng(seed), int(np.prod(across))
        with np.errstate(all="ignore"):
            for first in range(0, total, TOGETHER):
                numbers = np.arange(first, min(first + TOGETHER, total))
                shared = SharedMemory(len(numbers), shared_bytes, self._grain, self.program.threads, rng)
                batch = Batch(self.program, memory, shared, bits, across, numbers, rng)
                self._run(Group(batch, np.arange(len(numbers))))

    def _run(self, whole: Group) -> None:
        waiting = [whole]
        while waiting:
            group = waiting.pop()
            try:
                self._run_to(group, END, waiting)
            except PtxError as error:
                where = self.program.instructions[group.place - 1]
                raise type(error)(f"{self.program.name} {where}: {error}") from None

    def _run_to(self, group: Group, stop: int, waiting: list[Group]) -> None:
        """Run a group until its next instruction is `stop`. Programs that take another way are put into `waiting`."""
        steps, reached = self.steps, self.reached
        while group.place != stop:
            place = group.place
            reached[place] = True
            group.place = place + 1
            other = steps[place](group)
            if other is not None:
                waiting.append(other)
            group.steps += 1
            if group.steps > MOST_STEPS:
                raise PtxError("the kernel does not end")

    def _step_of(self, instruction: Instruction) -> Step:
        if instruction.opcode in ("bra", "bra.uni"):
            return self._branch(instruction)
        return step_of(self.program, instruction)

    def _branch(self, instruction: Instruction) -> Step:
        (label,) = instruction.operands
        if not isinstance(label, Symbol) or label.name not in self.program.labels:
            raise UnsupportedError(f"branch to {label}")
        target, guard = self.program.labels[label.name], guard_of(self.program, instruction)

        def jump(group: Group) -> None:
            group.place = target

        def branch(group: Group) -> Group | None:
            taken = guard(group)
            if group.mask is not None or (taken.shape[1] > 1 and np.any(taken != taken[:, :1])):
                self._part_lanes(group, group.full(taken), target)
                return None
            chosen = taken[:, 0]
            if chosen.all():
                group.place = target
            elif chosen.any():
                other = group.split(chosen)
                other.place = target
                return other
            return None

        return jump if guard is None else branch

    def _part_lanes(self, group: Group, taken: Array, target: int) -> None:
        """Run both sides of a branch, each with its lanes, and stop where they meet."""
        whole, behind = group.mask, group.place
        staying, going = group.active(None) & ~taken, group.active(None) & taken
        meeting = self._meeting[behind - 1]
        for mask, place in ((staying, behind), (going, target)):
            if not mask.any():
                continue
            group.mask, group.place = mask, place
            alone: list[Group] = []
            self._run_to(group, meeting, alone)
            assert not alone  # programs split only where no lanes are apart
        group.mask, group.place = whole, meeting


def step_of(program: Program, instruction: Instruction) -> Step:
    """What an instruction does to a group. Raises `UnsupportedError` for an unknown one."""
    opcode = instruction.opcode
    if opcode in ("ret", "exit"):
        return _end(instruction)
    if any(isinstance(operand, Pack) for operand in instruction.operands) and opcode in (
        "mov.b32",
        "mov.b64",
    ):
        return _repack(program, instruction)
    made = memory_step(program, instruction) or warp_step(program, instruction)
    if made is None:
        return _compute(program, instruction)
    return made


def _compute(program: Program, instruction: Instruction) -> Step:
    operation = OPERATIONS.get(instruction.opcode)
    if operation is None:
        raise UnsupportedError(f"unknown opcode {instruction.opcode}")
    result, *given = instruction.operands
    if len(given) != len(operation.sources):
        raise UnsupportedError(f"{len(given)} operands where {len(operation.sources)} are known")
    write, compute = writer(program, instruction, result, operation.result), operation.compute
    reads = [reader(program, operand, kind) for operand, kind in zip(given, operation.sources, strict=True)]

    def step(group: Group) -> None:
        write(group, compute(*[read(group) for read in reads]))

    return step


def _repack(program: Program, instruction: Instruction) -> Step:
    """`mov` between a register and the two registers of its halves."""
    size = int(instruction.opcode[-2:])
    result, given = instruction.operands
    packed = result if isinstance(result, Pack) else given
    if not isinstance(packed, Pack) or len(packed.items) != 2:
        raise UnsupportedError("mov of other than two halves")
    if isinstance(result, Pack):
        read = reader(program, given, f"b{size}")
        writes = [
            (index, writer(program, instruction, item, f"b{size // 2}"))
            for index, item in enumerate(result.items)
            if item != Symbol("_")  # a half that is not wanted
        ]

        def unpack(group: Group) -> None:
            both = halves(read(group))
            for index, write in writes:
                write(group, both[index])

        return unpack
    reads = [reader(program, item, f"b{size // 2}") for item in packed.items]
    write = writer(program, instruction, result, f"b{size}")

    def pack(group: Group) -> None:
        write(group, pair(*(read(group) for read in reads)))

    return pack


def _end(instruction: Instruction) -> Step:
    if instruction.guard:
        raise UnsupportedError("a predicated end")

    def end(group: Group) -> None:
        if group.mask is not None:
            raise UnsupportedError("an end that some lanes of a program reach before others")
        group.place = END

    return end
