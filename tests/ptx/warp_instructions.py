"""Instructions of a whole warp: shuffles, reductions, `ldmatrix`, `mma.sync`, and the barrier of all warps.

All lanes of a warp must take part; a predicate on one of these is refused, as is a mask that leaves lanes out.
"""

import re
from collections.abc import Callable

import numpy as np
from ptx.matrix import loaded, multiply
from ptx.operands import Group, address_of, reader, writer
from ptx.program import Immediate, Instruction, Operand, Pack, Program, UnsupportedError

Step = Callable[[Group], None]
LANES = np.arange(32)
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


def warp_step(program: Program, instruction: Instruction) -> Step | None:
    """The step of an instruction of a warp, or None for another one."""
    opcode = instruction.opcode
    made: Callable[[Program, Instruction], Step] | None = None
    if re.fullmatch(r"shfl\.sync\.(up|down|bfly|idx)\.b32", opcode):
        made = _shuffle
    elif re.fullmatch(r"redux\.sync\.((add|min|max)\.[su]32|(and|or)\.b32)", opcode):
        made = _reduce
    elif re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", opcode):
        made = _load_matrix
    elif re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16\.f16|bf16\.bf16)\.f32", opcode):
        made = _multiply
    elif opcode in ("bar.sync", "barrier.sync", "bar.warp.sync"):
        made = _barrier
    if made is None:
        return None
    if instruction.guard:
        raise UnsupportedError(f"a predicated {opcode}")
    step = made(program, instruction)

    def with_all_lanes(group: Group) -> None:
        group.need_all_lanes()
        step(group)

    return with_all_lanes


def _whole_mask(program: Program, operand: Operand) -> Callable[[Group], None]:
    read = reader(program, operand, "u32")

    def check(group: Group) -> None:
        if np.any(read(group) != np.uint32(0xFFFFFFFF)):
            raise UnsupportedError("a mask that leaves lanes of the warp out")

    return check


def _warps(group: Group, value: np.ndarray) -> np.ndarray:
    return group.full(value).reshape(len(group.rows), -1, 32)


def _shuffle(program: Program, instruction: Instruction) -> Step:
    """Source: the pseudocode of PTX ISA, "shfl.sync"."""
    mode = instruction.opcode.split(".")[2]
    result, value, shift, clamp, mask = instruction.operands
    write, read = writer(program, instruction, result, "b32"), reader(program, value, "b32")
    by, limits, check = (
        reader(program, shift, "u32"),
        reader(program, clamp, "u32"),
        _whole_mask(program, mask),
    )

    def step(group: Group) -> None:
        check(group)
        values = _warps(group, read(group))
        count, both = (_warps(group, each(group)).astype(np.int64) for each in (by, limits))
        count, limit, segment = count & 31, both & 31, both >> 8 & 31
        highest = (LANES & segment) | (limit & ~segment)
        if mode == "up":
            source = LANES - count
            inside = source >= highest
        elif mode == "down":
            source = LANES + count
            inside = source <= highest
        elif mode == "bfly":
            source = LANES ^ count
            inside = source <= highest
        else:
            source = (LANES & segment) | (count & ~segment)
            inside = source <= highest
        source = np.where(inside, source, LANES)
        write(group, np.take_along_axis(values, source, 2).reshape(len(group.rows), -1))

    return step


def _reduce(program: Program, instruction: Instruction) -> Step:
    _, _, name, kind = instruction.opcode.split(".")
    result, value, mask = instruction.operands
    write, read = writer(program, instruction, result, kind), reader(program, value, kind)
    check, combine = _whole_mask(program, mask), REDUCTIONS[name]

    def step(group: Group) -> None:
        check(group)
        values = _warps(group, read(group))
        total = combine.reduce(values, axis=2, keepdims=True, dtype=values.dtype)
        write(group, np.repeat(total, 32, axis=2).reshape(len(group.rows), -1))

    return step


def _load_matrix(program: Program, instruction: Instruction) -> Step:
    parts = instruction.opcode.split(".")
    count, transposed = int(parts[4][1]), "trans" in parts
    registers, memory = instruction.operands
    if not isinstance(registers, Pack) or len(registers.items) != count:
        raise UnsupportedError(f"{registers} for {count} matrices")
    writes = [writer(program, instruction, item, "b32") for item in registers.items]
    address = address_of(program, memory)
    naming = (np.arange(program.threads) % 32 < 8 * count)[None, :]  # the lanes whose addresses count

    def step(group: Group) -> None:
        where = group.full(address(group))
        rows = group.batch.shared.load(group.rows, where, "u2", 8, group.full(naming), group.epoch)
        for write, value in zip(writes, loaded(rows, count, transposed=transposed), strict=True):
            write(group, value)

    return step


def _multiply(program: Program, instruction: Instruction) -> Step:
    kind = instruction.opcode.split(".")[7]
    packs = [operand.items for operand in instruction.operands if isinstance(operand, Pack)]
    if [len(items) for items in packs] != [4, 4, 2, 4]:
        raise UnsupportedError("mma with other fragments")
    writes = [writer(program, instruction, item, "b32") for item in packs[0]]
    a, b, c = ([reader(program, item, "b32") for item in items] for items in packs[1:])

    def step(group: Group) -> None:
        operands = ([group.full(read(group)) for read in reads] for reads in (a, b, c))
        for write, value in zip(writes, multiply(*operands, kind), strict=True):
            write(group, value)

    return step


def _barrier(program: Program, instruction: Instruction) -> Step:
    if instruction.opcode == "bar.warp.sync":
        return _whole_mask(program, instruction.operands[0])
    number, *count = instruction.operands
    if number != Immediate("0") or (count and count != [Immediate(str(program.threads))]):
        raise UnsupportedError("a barrier of a part of the warps")

    def step(group: Group) -> None:
        group.epoch += 1

    return step
