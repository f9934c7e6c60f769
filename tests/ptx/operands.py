"""Programs that run in step, and how instructions read and write their registers.

A register is an array [programs, lanes] of unsigned integers. An axis on which all values are equal has length 1.
A register that was never written holds random bits, as in a GPU; so two runs with different seeds show a use of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from ptx.arithmetic import NUMPY, value_of
from ptx.global_memory import GlobalMemory
from ptx.program import Address, Immediate, Instruction, Operand, Program, Register, Symbol, UnsupportedError
from ptx.shared_memory import BASE, Copy, SharedMemory

Array = np.ndarray
Read = Callable[["Group"], Array]


@dataclass
class Batch:
    """Programs (CTAs) that are interpreted together, and what they share."""

    program: Program
    memory: GlobalMemory
    shared: SharedMemory
    arguments: dict[str, Array]  # by parameter, unsigned [1, 1]
    grid: tuple[int, int, int]
    numbers: Array  # int64 [programs], in the order of the grid
    rng: np.random.Generator

    def special(self, name: str, rows: Array) -> Array:
        """A special register."""
        base, _, axis = name.partition(".")
        place = "xyz".find(axis)
        if base == "%ctaid":
            before = int(np.prod(self.grid[:place], dtype=np.int64))
            return (self.numbers[rows] // before % self.grid[place]).astype(np.uint32)[:, None]
        if base == "%nctaid":
            return np.array([[self.grid[place]]], np.uint32)
        if base == "%ntid":
            return np.array([[self.program.threads if axis == "x" else 1]], np.uint32)
        lanes = np.arange(self.program.threads, dtype=np.uint32)[None, :]
        if base == "%tid":
            return lanes if axis == "x" else np.zeros((1, 1), np.uint32)
        if base == "%laneid":
            return lanes % np.uint32(32)
        raise UnsupportedError(f"special register {name}")


@dataclass
class Group:
    """Programs of a batch that stand at the same instruction and have met the same barriers."""

    batch: Batch
    rows: Array  # int64 [programs]
    registers: dict[str, Array] = field(default_factory=dict)
    place: int = 0  # the next instruction; END: the programs have ended
    epoch: int = 1  # barriers met, plus 1
    mask: Array | None = None  # bool [programs, lanes]: the lanes that run; None: all
    steps: int = 0  # instructions run
    issued: list[Copy] = field(default_factory=list)  # asynchronous copies that are not committed
    committed: list[list[Copy]] = field(default_factory=list)

    def split(self, chosen: Array) -> "Group":
        """Take the chosen programs out into a group of their own."""
        other = self._part(chosen)
        rest = self._part(~chosen)
        self.rows, self.registers = rest.rows, rest.registers
        self.issued, self.committed = rest.issued, rest.committed
        return other

    def full(self, value: Array) -> Array:
        """The value with both axes written out."""
        return np.broadcast_to(value, (len(self.rows), self.batch.program.threads))

    def chosen(self, guard: Read | None) -> Array | None:
        """Which lanes an instruction applies to; None: all."""
        if guard is None:
            return self.mask
        return guard(self) if self.mask is None else guard(self) & self.mask

    def active(self, guard: Read | None) -> Array:
        """Which lanes an instruction applies to, bool [programs, lanes]."""
        found = self.chosen(guard)
        return self.full(np.ones((1, 1), bool) if found is None else found)

    def need_all_lanes(self) -> None:
        """Refuse an instruction of whole warps where lanes of a program are apart."""
        if self.mask is not None:
            raise UnsupportedError("needs all lanes, and some have branched elsewhere")

    def _part(self, chosen: Array) -> "Group":
        kept = {name: value[chosen] if len(value) > 1 else value for name, value in self.registers.items()}
        committed = [[copy.of(chosen) for copy in group] for group in self.committed]
        return Group(
            self.batch, self.rows[chosen], kept, self.place, self.epoch,
            issued=[copy.of(chosen) for copy in self.issued], committed=committed, steps=self.steps,
        )  # fmt: skip


def reader(program: Program, operand: Operand, kind: str) -> Read:
    """How an operand is read as an array of the PTX type `kind`."""
    wanted = np.dtype(NUMPY[kind])
    if isinstance(operand, Immediate):
        constant = value_of(operand.text, kind)
        return lambda group: constant
    if isinstance(operand, Symbol):
        if operand.name != program.shared_name:
            raise UnsupportedError(f"the address of {operand.name}")
        base = np.full((1, 1), BASE, wanted)
        return lambda group: base
    if not isinstance(operand, Register):
        raise UnsupportedError(f"operand {operand}")
    name = operand.name
    if name.startswith(("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid")):
        return lambda group: group.batch.special(name, group.rows)
    held = np.dtype(program.raw(name))

    def read(group: Group) -> Array:
        value = group.registers.get(name)
        if value is None:
            value = group.registers[name] = _garbage(group, held)
        return value if held == wanted else value.view(wanted)

    def read_part(group: Group) -> Array:
        return read_whole(group).astype(f"u{wanted.itemsize}").view(wanted)

    if held.itemsize == wanted.itemsize:
        return read
    if held.itemsize < wanted.itemsize or held.kind == "b":
        raise UnsupportedError(f"register {name} is narrower than {kind}")
    read_whole = reader(program, operand, f"u{8 * held.itemsize}")
    return read_part


def _garbage(group: Group, held: np.dtype) -> Array:
    shape = (len(group.rows), group.batch.program.threads)
    bits = group.batch.rng.integers(0, 256, (*shape, held.itemsize), dtype=np.uint8)
    return bits[..., 0] > 127 if held.kind == "b" else bits.view(held)[..., 0]


def guard_of(program: Program, instruction: Instruction) -> Read | None:
    """The predicate of an instruction, or None."""
    if not instruction.guard:
        return None
    read = reader(program, Register(instruction.guard), "pred")
    return (lambda group: ~read(group)) if instruction.negated else read


def writer(
    program: Program, instruction: Instruction, operand: Operand, kind: str
) -> Callable[[Group, Array], None]:
    """How a result of type `kind` is put into a register, where the guard allows it.

    A result that is narrower than its register is extended, with its sign if the type has one.
    """
    if not isinstance(operand, Register):
        raise UnsupportedError(f"result {operand}")
    name, guard = operand.name, guard_of(program, instruction)
    held, given = np.dtype(program.raw(name)), np.dtype(NUMPY[kind])
    if given.itemsize > held.itemsize:
        raise UnsupportedError(f"register {name} is narrower than {kind}")
    old = reader(program, operand, "pred" if held.kind == "b" else f"u{8 * held.itemsize}")
    widened = held.itemsize != given.itemsize

    def write(group: Group, value: Array) -> None:
        if widened:
            value = value.view(given).astype(f"i{held.itemsize}" if given.kind == "i" else held)
        if value.dtype != held:
            value = value.view(held)
        chosen = group.chosen(guard)
        if chosen is not None:
            value = np.where(chosen, value, old(group))
        group.registers[name] = value

    return write


def address_of(program: Program, operand: Operand) -> Read:
    """An address as int64, registers of 32 or 64 bits."""
    if not isinstance(operand, Address):
        raise UnsupportedError(f"address {operand}")
    if isinstance(operand.base, Symbol):
        base = reader(program, operand.base, "u32")
    else:
        base = reader(program, operand.base, f"u{8 * np.dtype(program.raw(operand.base.name)).itemsize}")
    offset = operand.offset
    return lambda group: base(group).astype(np.int64) + offset
