"""What each arithmetic instruction computes, by its full opcode. An opcode that is not in `OPERATIONS` is refused.

Operations take and give NumPy arrays of the operand types. Values of bf16 are held as their 16 bits.
Add, subtract, multiply and fused multiply-add round to nearest even (`fma` by way of float64, so it may differ from a
single rounding in one of about 2^29 cases). The approximate functions are off by a pseudo-random part of the error that
the PTX ISA allows, so nothing passes because they were exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

INTEGERS = {
    f"{sign}{bits}": f"{kind}{bits // 8}"
    for sign, kind in zip("sub", "iuu", strict=True)
    for bits in (8, 16, 32, 64)
}
NUMPY = {  # of each PTX type
    **INTEGERS,
    "f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "pred": "?",
    "e4m3x2": "u2", "e5m2x2": "u2",
}  # fmt: skip
SMALLEST = np.float32(2.0**-126)


class Operation(NamedTuple):
    """Types of result and operands (names of PTX), and the function."""

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., np.ndarray]


OPERATIONS: dict[str, Operation] = {}


def define(opcode: str, result: str, sources: str, compute: Callable[..., np.ndarray]) -> None:
    """Add an opcode."""
    OPERATIONS[opcode] = Operation(result, tuple(sources.split()), compute)


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 (its bits) as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def flushed(value: np.ndarray) -> np.ndarray:
    """float32 with subnormal numbers made 0 of the same sign (`.ftz`)."""
    return np.where(np.abs(value) < SMALLEST, np.copysign(np.float32(0), value), value)


def ftz(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The same function with subnormal operands and results flushed."""
    return lambda *values: flushed(compute(*map(flushed, values)))


def astray(exact: np.ndarray, allowed: np.ndarray | float, *inputs: np.ndarray) -> np.ndarray:
    """float32 of `exact` (float64), moved by a part of the `allowed` absolute error: the inputs' bits decide which."""
    seed = np.zeros((1, 1), np.uint32)
    for value in inputs:
        seed = (seed ^ value.view(np.uint32)) * np.uint32(2654435761)
        seed = seed ^ (seed >> np.uint32(15))
    part = seed.astype(np.float64) / 2**31 - 1
    moved = exact + np.where(np.isfinite(exact) & (exact != 0), part * allowed, 0)
    return moved.astype(np.float32)


def _exponential(x: np.ndarray) -> np.ndarray:
    exact = np.exp2(x.astype(np.float64))
    return astray(exact, np.where(flushed(x) == 0, 0, exact * 2.0**-22), x)


def _logarithm(x: np.ndarray) -> np.ndarray:
    exact = np.log2(x.astype(np.float64))
    near = (x >= 0.5) & (x <= 2)
    return astray(exact, np.where(near, 2.0**-22, np.abs(exact) * 2.0**-22), x)


def _ulps(count: float, compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def approximate(*values: np.ndarray) -> np.ndarray:
        exact = compute(*(value.astype(np.float64) for value in values))
        return astray(exact, count * np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64), *values)

    return approximate


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division that truncates; any value where b is 0 (PTX ISA: unspecified)."""
    safe = np.where(b == 0, np.ones_like(b), b)
    found = a // safe
    if a.dtype.kind == "i":
        found = found + ((found * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(a), found)


def _upper_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product of 16 or 32 bits."""
    wide = np.dtype(f"{a.dtype.kind}8")
    return (a.astype(wide) * b.astype(wide) >> wide.type(8 * a.itemsize)).astype(a.dtype)


def _shift_left(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    bits = a.dtype.type(8 * a.itemsize - 1)
    return np.where(count > bits, a.dtype.type(0), a << (count.astype(a.dtype) & bits))


def _shift_right(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Signed types repeat the sign; unsigned ones are 0 from the number of their bits on."""
    last = np.uint32(8 * a.itemsize - 1)
    found = a >> np.minimum(count, last).astype(a.dtype)
    return found if a.dtype.kind == "i" else np.where(count > last, a.dtype.type(0), found)


def _field(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`bfe`: bits `position` to `position + length`, with the sign of the highest for signed types."""
    bits = np.uint32(8 * a.itemsize)
    start, count = position & np.uint32(255), length & np.uint32(255)
    raw = a.view(f"u{a.itemsize}")
    one = raw.dtype.type(1)
    below = (one << np.minimum(count, bits - np.uint32(1)).astype(raw.dtype)) - one
    mask = np.where(count >= bits, ~raw.dtype.type(0), below)
    found = _shift_right(raw, start) & mask
    if a.dtype.kind == "i":
        highest = np.minimum(start + count - np.uint32(1), bits - np.uint32(1))
        negative = (_shift_right(raw, highest) & one).astype(bool) & (count > 0)
        found = np.where(negative, found | ~mask, found)
    return found.view(a.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """`prmt`: each byte of the result is one of the eight of b (upper) and a, or its sign bit repeated."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros((1, 1), np.uint32)
    for place in range(4):
        chosen = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (chosen & np.uint32(7)))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte > 127, np.uint32(255), np.uint32(0))
        found = found | np.where(chosen > 7, sign, byte) << np.uint32(8 * place)
    return found


COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _ordered(compare: Callable[..., np.ndarray], *, unordered: bool) -> Callable[..., np.ndarray]:
    def compared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        neither = np.isnan(a) | np.isnan(b)
        return compare(a, b) | neither if unordered else compare(a, b) & ~neither

    return compared


def _on_bf16(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A choice between two float32 values as one between two bf16."""
    return lambda a, b: (compute(widen(a), widen(b)).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _define_integers() -> None:
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        two = f"{kind} {kind}"
        for name, compute in (
            ("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply), ("min", np.minimum), ("max", np.maximum),
            ("div", _quotient), ("rem", lambda a, b: a - _quotient(a, b) * b),
        ):  # fmt: skip
            define(f"{name}.{kind}", kind, two, compute)
        define(f"mad.lo.{kind}", kind, f"{two} {kind}", lambda a, b, c: a * b + c)
        define(f"shr.{kind}", kind, f"{kind} u32", _shift_right)
        if kind[0] == "s":
            define(f"neg.{kind}", kind, kind, np.negative)
            define(f"abs.{kind}", kind, kind, np.abs)
        if kind[1:] != "64":
            define(f"mul.hi.{kind}", kind, two, _upper_product)
        if kind[1:] != "16":
            define(f"bfe.{kind}", kind, f"{kind} u32 u32", _field)
        for name, compare in COMPARISONS.items():
            define(f"setp.{name}.{kind}", "pred", two, compare)
    for kind, wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        held = np.dtype(NUMPY[wide])
        define(f"mul.wide.{kind}", wide, f"{kind} {kind}", lambda a, b, t=held: a.astype(t) * b.astype(t))
        define(
            f"mad.wide.{kind}",
            wide,
            f"{kind} {kind} {wide}",
            lambda a, b, c, t=held: a.astype(t) * b.astype(t) + c,
        )


def _define_bits() -> None:
    for kind in ("pred", "b16", "b32", "b64"):
        for name, compute in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
            define(f"{name}.{kind}", kind, f"{kind} {kind}", compute)
        define(f"not.{kind}", kind, kind, np.invert)
        define(f"mov.{kind}", kind, kind, lambda a: a)
        if kind != "pred":
            define(f"shl.{kind}", kind, f"{kind} u32", _shift_left)
            define(f"shr.{kind}", kind, f"{kind} u32", _shift_right)
            for name in ("eq", "ne"):
                define(f"setp.{name}.{kind}", "pred", f"{kind} {kind}", COMPARISONS[name])
    define("prmt.b32", "b32", "b32 b32 b32", _permuted)
    for kind in ("u16", "u32", "u64", "s32", "s64", "f32", "f64"):
        define(f"mov.{kind}", kind, kind, lambda a: a)
    for kind in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"):
        define(f"selp.{kind}", kind, f"{kind} {kind} pred", lambda a, b, p: np.where(p, a, b))


def _define_floats() -> None:
    for name, sources, compute in (
        ("add", 2, np.add), ("sub", 2, np.subtract), ("mul", 2, np.multiply), ("fma.rn", 3, _fma),
        ("neg", 1, np.negative), ("abs", 1, np.abs), ("min", 2, np.fmin), ("max", 2, np.fmax),
        ("min.NaN", 2, np.minimum), ("max.NaN", 2, np.maximum),
        ("div.rn", 2, np.divide), ("sqrt.rn", 1, np.sqrt), ("rcp.rn", 1, np.reciprocal),
        ("ex2.approx", 1, _exponential), ("lg2.approx", 1, _logarithm),
        ("rcp.approx", 1, _ulps(1, np.reciprocal)), ("div.full", 2, _ulps(2, np.divide)),
        ("div.approx", 2, _ulps(2, np.divide)), ("sqrt.approx", 1, _ulps(1, np.sqrt)),
    ):  # fmt: skip
        kinds = " ".join(["f32"] * sources)
        names = {name} | ({f"{name}.rn"} if name in ("add", "sub", "mul") else set())
        for each in names:
            define(f"{each}.f32", "f32", kinds, compute)
            first, _, rest = each.partition(".")
            flushing = [first, "ftz", rest] if rest == "NaN" else [first, rest, "ftz"]
            define(".".join(filter(None, [*flushing, "f32"])), "f32", kinds, ftz(compute))
    for name, compare in COMPARISONS.items():
        for suffix, unordered in (("", False), ("u", True)):
            test = _ordered(compare, unordered=unordered)
            define(f"setp.{name}{suffix}.f32", "pred", "f32 f32", test)
            define(
                f"setp.{name}{suffix}.ftz.f32",
                "pred",
                "f32 f32",
                lambda a, b, t=test: t(flushed(a), flushed(b)),
            )
    define("setp.nan.f32", "pred", "f32 f32", lambda a, b: np.isnan(a) | np.isnan(b))
    define("setp.num.f32", "pred", "f32 f32", lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    define("abs.bf16", "bf16", "bf16", lambda a: a & np.uint16(0x7FFF))
    define("neg.bf16", "bf16", "bf16", lambda a: a ^ np.uint16(0x8000))
    for name, compute in (("max", np.fmax), ("min", np.fmin)):
        define(f"{name}.bf16", "bf16", "bf16 bf16", _on_bf16(compute))


def _define_doubles() -> None:
    """float64, which the launch policy computes in."""

    def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        wide = np.longdouble
        return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float64)

    for name, sources, compute in (
        ("add", 2, np.add), ("mul", 2, np.multiply), ("fma.rn", 3, fused), ("div.rn", 2, np.divide),
        ("sqrt.rn", 1, np.sqrt), ("copysign", 2, lambda sign, size: np.copysign(size, sign)),
    ):  # fmt: skip
        define(f"{name}.f64", "f64", " ".join(["f64"] * sources), compute)
    for name, compare in COMPARISONS.items():
        define(f"setp.{name}.f64", "pred", "f64 f64", _ordered(compare, unordered=False))


def value_of(text: str, kind: str) -> np.ndarray:
    """A written number as [1, 1] of an operand type: integers, `0fXXXXXXXX` and `0dXXXXXXXXXXXXXXXX`."""
    dtype = np.dtype(NUMPY[kind])
    if text[:2] in ("0f", "0F", "0d", "0D"):
        single = text[1] in "fF"
        bits = int(text[2:], 16).to_bytes(4 if single else 8, "little")
        found = np.frombuffer(bits, "f4" if single else "f8").reshape(1, 1)
        return found.view(dtype) if dtype.itemsize == found.itemsize else found.astype(dtype)
    number = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.array([[number != 0]])
    if dtype.kind == "f":
        return np.array([[number]], f"u{dtype.itemsize}").view(dtype)
    return np.array([[number % 2 ** (8 * dtype.itemsize)]], f"u{dtype.itemsize}").view(dtype)


_define_integers()
_define_bits()
_define_floats()
_define_doubles()
