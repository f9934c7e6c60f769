"""Loads, stores and asynchronous copies, of the forms that Triton emits for our kernels."""

import re
from collections.abc import Callable

import numpy as np
from ptx.arithmetic import NUMPY
from ptx.operands import Group, address_of, guard_of, reader, writer
from ptx.program import (
    AccessError,
    Address,
    Immediate,
    Instruction,
    Operand,
    Pack,
    Program,
    Symbol,
    UnsupportedError,
)

Step = Callable[[Group], None]
KINDS = "|".join(
    kind for kind in NUMPY if kind[0] in "bsuf" and kind[-1].isdigit() and not kind.startswith("bf")
)


def memory_step(program: Program, instruction: Instruction) -> Step | None:
    """The step of a memory instruction, or None for another one."""
    opcode = instruction.opcode
    found = re.fullmatch(rf"(ld|st)\.(param|global|shared)(?:\.v([24]))?\.({KINDS})", opcode)
    if found:
        verb, space, vector, kind = found.groups()
        made = {
            ("ld", "param"): _load_parameter,
            ("ld", "global"): _load_global,
            ("ld", "shared"): _load_shared,
            ("st", "global"): _store_global,
            ("st", "shared"): _store_shared,
        }.get((verb, space))
        if made is None:
            raise UnsupportedError(opcode)
        step: Step = made(program, instruction, kind, int(vector or 1))
        return step
    if opcode in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"):
        return _copy(program, instruction)
    if opcode in ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"):
        if instruction.guard:
            raise UnsupportedError(f"a predicated {opcode}")
        return _group_step(instruction)
    return None


def shared_grain(program: Program) -> int:
    """Bytes of the narrowest access to shared memory."""
    found = [
        int(re.search(r"(\d+)$", instruction.opcode)[1]) // 8  # type: ignore[index]
        for instruction in program.instructions
        if instruction.opcode.startswith(("ld.shared", "st.shared"))
    ]
    return min(found, default=4)


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Pack) else (operand,)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} registers for {count} elements")
    return items


def _load_parameter(program: Program, instruction: Instruction, kind: str, count: int) -> Step:
    value, memory = instruction.operands
    if not isinstance(memory, Address) or not isinstance(memory.base, Symbol) or memory.offset or count > 1:
        raise UnsupportedError(f"parameter {memory}")
    name = memory.base.name
    write = writer(program, instruction, value, kind)
    size = np.dtype(NUMPY[kind]).itemsize
    if np.dtype(NUMPY[program.parameters[name]]).itemsize != size:
        raise UnsupportedError(f"parameter {name} is read with another width")
    return lambda group: write(group, group.batch.arguments[name].view(NUMPY[kind]))


def _load_global(program: Program, instruction: Instruction, kind: str, count: int) -> Step:
    address = address_of(program, instruction.operands[1])
    writes = [writer(program, instruction, item, kind) for item in _items(instruction.operands[0], count)]
    guard, element = guard_of(program, instruction), NUMPY[kind]

    def step(group: Group) -> None:
        active = group.chosen(guard)
        numbers = group.batch.numbers[group.rows][:, None]
        found = group.batch.memory.load(address(group), element, count, active, numbers)
        for write, value in zip(writes, found, strict=True):
            write(group, value)

    return step


def _store_global(program: Program, instruction: Instruction, kind: str, count: int) -> Step:
    address = address_of(program, instruction.operands[0])
    reads = [reader(program, item, kind) for item in _items(instruction.operands[1], count)]
    guard = guard_of(program, instruction)

    def step(group: Group) -> None:
        active = group.chosen(guard)
        numbers = group.batch.numbers[group.rows][:, None]
        group.batch.memory.store(address(group), [read(group) for read in reads], active, numbers)

    return step


def _load_shared(program: Program, instruction: Instruction, kind: str, count: int) -> Step:
    address = address_of(program, instruction.operands[1])
    writes = [writer(program, instruction, item, kind) for item in _items(instruction.operands[0], count)]
    guard, element = guard_of(program, instruction), NUMPY[kind]

    def step(group: Group) -> None:
        where, active = group.full(address(group)), group.active(guard)
        found = group.batch.shared.load(group.rows, where, element, count, active, group.epoch)
        for write, value in zip(writes, found, strict=True):
            write(group, value)

    return step


def _store_shared(program: Program, instruction: Instruction, kind: str, count: int) -> Step:
    address = address_of(program, instruction.operands[0])
    reads = [reader(program, item, kind) for item in _items(instruction.operands[1], count)]
    guard = guard_of(program, instruction)

    def step(group: Group) -> None:
        where, active = group.full(address(group)), group.active(guard)
        group.batch.shared.store(group.rows, where, [read(group) for read in reads], active, group.epoch)

    return step


def _copy(program: Program, instruction: Instruction) -> Step:
    """`cp.async`: the first src-size bytes of the source, then zeros, into shared memory, some time later."""
    target, source, *sizes = instruction.operands
    if len(sizes) not in (1, 2) or not isinstance(sizes[0], Immediate):
        raise UnsupportedError("cp.async without a constant size")
    width = int(sizes[0].text, 0)
    allowed = (16,) if ".cg." in instruction.opcode else (4, 8, 16)
    if width not in allowed:
        raise UnsupportedError(f"{instruction.opcode} of {width} bytes")
    to, origin = address_of(program, target), address_of(program, source)
    given = reader(program, sizes[1], "u32") if len(sizes) == 2 else None
    guard = guard_of(program, instruction)

    def step(group: Group) -> None:
        active, where = group.active(guard), group.full(origin(group))
        size = group.full(np.full((1, 1), width, np.uint32) if given is None else given(group))
        if np.any(active & (size > width)):
            raise AccessError(f"cp.async reads {size.max()} bytes for {width}")
        if np.any(active & (size != width) & (size != 0)):
            raise UnsupportedError("cp.async of a part of its width")
        if np.any(active & (where % width != 0)):
            raise AccessError(f"cp.async from an address that is no multiple of {width}")
        numbers = group.batch.numbers[group.rows][:, None]
        copied = active & (size == width)
        words = group.batch.memory.load(where, "u4", width // 4, copied, numbers)
        data = np.stack([np.where(copied, word, np.uint32(0)) for word in words], axis=-1).view(np.uint8)
        group.issued.append(
            group.batch.shared.issue(group.rows, group.full(to(group)), data, active, group.epoch)
        )

    return step


def _group_step(instruction: Instruction) -> Step:
    if instruction.opcode == "cp.async.commit_group":

        def commit(group: Group) -> None:
            group.need_all_lanes()
            group.committed.append(group.issued)
            group.issued = []

        return commit
    everything = instruction.opcode == "cp.async.wait_all"
    kept = 0 if everything else _constant(instruction.operands[0])

    def wait(group: Group) -> None:
        group.need_all_lanes()
        if everything:
            group.committed.append(group.issued)
            group.issued = []
        while len(group.committed) > kept:
            for copy in group.committed.pop(0):
                group.batch.shared.complete(copy, group.epoch)

    return wait


def _constant(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise UnsupportedError(f"operand {operand}")
    return int(operand.text, 0)
