"""What each `cvt` computes, by its full opcode, with the rounding that it names.

8-bit floats are decoded and encoded by tables of their 256 values, not by torch. Source: PTX ISA, "cvt", and the OCP
8-bit floating point specification.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from ptx.arithmetic import NUMPY, define, widen

INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


def narrow_bf16(value: np.ndarray) -> np.ndarray:
    """float32 to the bits of bf16, to nearest even. NaN becomes 0x7fff."""
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded.astype(np.uint16))


def toward_zero_f16(value: np.ndarray) -> np.ndarray:
    """float32 to float16, toward 0."""
    near = value.astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(value)
    return (near.view(np.uint16) - beyond.astype(np.uint16)).view(np.float16)


@cache
def small_values(kind: str) -> np.ndarray:
    """The 256 values of an 8-bit float. e4m3 has no infinity and one NaN; e5m2 is the upper half of float16."""
    code = np.arange(256)
    if kind == "e5m2":
        return (code.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code >= 128, -size, size).astype(np.float32)


def encode_small(value: np.ndarray, kind: str) -> np.ndarray:
    """float32 to the nearest of the finite values of an 8-bit float, ties to even (`.satfinite`). NaN stays NaN."""
    values = small_values(kind)[:128]
    finite = values[np.isfinite(values)].astype(np.float64)
    size = np.abs(value).astype(np.float64)
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(np.isnan(value), 127, np.where(up, above, above - 1))
    return (code + 128 * np.signbit(value)).astype(np.uint8)


def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two halves as one integer of twice the width; `low` in the lower half."""
    wide = {1: np.uint16, 2: np.uint32, 4: np.uint64}[low.itemsize]
    raw = low.view(f"u{low.itemsize}"), high.view(f"u{high.itemsize}")
    return raw[0].astype(wide) | raw[1].astype(wide) << wide(8 * low.itemsize)


def halves(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper half of unsigned integers."""
    bits = 4 * value.itemsize
    small = np.dtype(f"u{value.itemsize // 2}")
    return value.astype(small), (value >> value.dtype.type(bits)).astype(small)


def _expand(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    def both(value: np.ndarray) -> np.ndarray:
        return pair(*(small_values(kind)[half].astype(np.float16) for half in halves(value)))

    return both


def _shrink(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    def both(value: np.ndarray) -> np.ndarray:
        return pair(*(encode_small(half.view(np.float16).astype(np.float32), kind) for half in halves(value)))

    return both


def _define() -> None:
    for source in INTEGERS:
        for result in INTEGERS:
            if source != result:
                define(f"cvt.{result}.{source}", result, source, lambda a, t=NUMPY[result]: a.astype(t))
        define(f"cvt.rn.f32.{source}", "f32", source, lambda a: a.astype(np.float32))
        define(f"cvt.rn.f64.{source}", "f64", source, lambda a: a.astype(np.float64))
    define("cvt.f32.bf16", "f32", "bf16", widen)
    define("cvt.f32.f16", "f32", "f16", lambda a: a.astype(np.float32))
    define("cvt.rn.f16.f32", "f16", "f32", lambda a: a.astype(np.float16))
    define("cvt.rz.f16.f32", "f16", "f32", toward_zero_f16)
    define("cvt.rn.bf16.f32", "bf16", "f32", narrow_bf16)
    # The first operand goes into the upper half.
    define("cvt.rn.bf16x2.f32", "bf16x2", "f32 f32", lambda a, b: pair(narrow_bf16(b), narrow_bf16(a)))
    define(
        "cvt.rn.f16x2.f32", "f16x2", "f32 f32", lambda a, b: pair(b.astype(np.float16), a.astype(np.float16))
    )
    for kind in ("e4m3", "e5m2"):
        define(f"cvt.rn.f16x2.{kind}x2", "f16x2", f"{kind}x2", _expand(kind))
        define(f"cvt.rn.satfinite.{kind}x2.f16x2", f"{kind}x2", "f16x2", _shrink(kind))
        define(
            f"cvt.rn.satfinite.{kind}x2.f32",
            f"{kind}x2",
            "f32 f32",
            lambda a, b, k=kind: pair(encode_small(b, k), encode_small(a, k)),
        )


_define()
