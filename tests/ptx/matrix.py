"""`ldmatrix` and `mma.sync`: which element of a matrix each lane's registers hold.

Layouts are those of PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix": with
g = lane / 4 and t = lane % 4, a pair of neighbouring elements sits at row g, columns 2t and 2t + 1.
Products are exact. Their sum is rounded to float32 once for each instruction; the ISA leaves order and rounding open.
"""

import numpy as np
from ptx.arithmetic import widen


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """16-bit elements as float64."""
    return {"bf16": widen, "f16": lambda bits: bits.view(np.float16)}[kind](bits).astype(np.float64)


def fragments(registers: list[np.ndarray]) -> np.ndarray:
    """Registers [programs, lanes] of every warp as [programs, warps, g, t, register]."""
    shape = np.broadcast_shapes(*(register.shape for register in registers))
    stacked = np.stack([np.broadcast_to(register, shape) for register in registers], axis=-1)
    return stacked.reshape(shape[0], shape[1] // 32, 8, 4, len(registers))


def multiply(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], kind: str) -> list[np.ndarray]:
    """D = A B + C of `mma.m16n8k16`: four registers of A, two of B, four float32 of C and D."""
    rows, columns, sums = (fragments(registers) for registers in (a, b, c))
    lead = rows.shape[:2]
    # registers of A in order: (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8)
    left = numbers(rows.view(np.uint16), kind).reshape(*lead, 8, 4, 2, 2, 2)  # g, t, k half, row half, pair
    left = left.transpose(0, 1, 5, 2, 4, 3, 6).reshape(*lead, 16, 16)
    right = numbers(columns.view(np.uint16), kind).reshape(
        *lead, 8, 4, 2, 2
    )  # g (the column), t, k half, pair
    right = right.transpose(0, 1, 4, 3, 5, 2).reshape(*lead, 16, 8)
    start = sums.view(np.float32).astype(np.float64).reshape(*lead, 8, 4, 2, 2)  # g, t, row half, pair
    start = start.transpose(0, 1, 4, 2, 3, 5).reshape(*lead, 16, 8)
    found = (left @ right + start).astype(np.float32)
    parts = found.reshape(*lead, 2, 8, 4, 2).transpose(0, 1, 3, 4, 2, 5).reshape(lead[0], -1, 4)
    return [np.ascontiguousarray(parts[..., index]).view(np.uint32) for index in range(4)]


def loaded(rows: list[np.ndarray], count: int, *, transposed: bool) -> list[np.ndarray]:
    """Registers of `ldmatrix.m8n8.x<count>` from the eight b16 of the row that each lane's address names.

    Lanes 0 to 7 name the rows of the first matrix, 8 to 15 those of the second, and so on.
    """
    whole = np.stack(rows, axis=-1)
    programs, lanes, _ = whole.shape
    matrices = whole.reshape(programs, lanes // 32, 4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(3, 4)
    pairs = np.ascontiguousarray(matrices).view(np.uint32)  # [programs, warps, matrix, g, t]
    return [pairs[:, :, index].reshape(programs, lanes) for index in range(count)]
