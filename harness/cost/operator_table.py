"""Timed operators of a GPU from a CSV, without the rows that cannot be.

The table is keyed by the device's name and needs no calibration of this machine. One row is one operator of one layer
on one device, with the columns that it has:

    device, op,      dtype, rows, tokens, context, heads, kv_heads, head_dim, m, n, k, us
    h100,   decode,  bf16,  64,   ,       4096,    32,    8,        128,       ,  ,  , 95.1
    h100,   prefill, bf16,  ,     512,    2048,    32,    8,        128,       ,  ,  , 88.0
    h100,   gemm,    bf16,  ,     ,       ,        ,      ,         ,       256, 6144, 4096, 24.4

`decode`: `rows` sequences with `context` KV slots each. `prefill`: a chunk of `tokens`, the last of `context` slots.
`gemm`: [m, k] by [k, n]. `dtype` is that of the KV, or of both matrices; bf16 where the column is absent.

Rows are left out and counted by two rules.

* Too fast: less than half a microsecond, more FLOP/s than the peak, or more bytes/s than the bandwidth where the bytes
  do not fit a GPU's caches.
* Too slow: more than ten times 100 us and the time that the datasheet's rates take, in which a decode has the share of
  the bandwidth that a multiprocessor for each row and KV head has; or more than three times as long as each of two
  other rows that are at least as large in every number.
"""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import numpy as np

from harness.config.errors import ConfigError
from harness.cost.roofline import DeviceShape

KEY = "cost.operators"
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "decode": ("rows", "context", "heads", "kv_heads", "head_dim"),
    "prefill": ("tokens", "context", "heads", "kv_heads", "head_dim"),
    "gemm": ("m", "n", "k"),
}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_CACHED_BYTES = 128e6  # the largest level-2 cache of the GPUs that have a preset (RTX PRO 6000)
_MULTIPROCESSORS = 100  # of a device that does not say
_SHORTEST_S = 0.5e-6  # no kernel takes less
_SLOW_S, _SLOW = 100e-6, 10.0  # the slowest that is kept: ten times (100 us + the datasheet's time)
_OUT_OF_LINE, _WITNESSES = 3.0, 2  # or three times as long as two rows that are at least as large


@dataclass(frozen=True)
class OperatorRow:
    """One timed operator: its numbers by column, its seconds, and the line of the file."""

    device: str
    op: str
    dtype: str
    shape: Mapping[str, int]
    seconds: float
    line: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that make the operator larger."""
        names = {"decode": ("rows", "context"), "prefill": ("tokens", "context"), "gemm": ("m", "n", "k")}
        return tuple(self.shape[name] for name in names[self.op])

    @property
    def fixed(self) -> tuple[int, ...]:
        """Heads, KV heads and head width, where it has them."""
        return tuple(self.shape[name] for name in ("heads", "kv_heads", "head_dim") if name in self.shape)

    @property
    def flops(self) -> float:
        """Operations: 4 x heads x head_dim a query-key pair, 2 x m x n x k."""
        one = self.shape
        if self.op == "gemm":
            return 2.0 * one["m"] * one["n"] * one["k"]
        pairs = float(one.get("rows", 1) * one["context"])
        if self.op == "prefill":
            pairs = one["tokens"] * (one["context"] - (one["tokens"] - 1) / 2)
        return 4.0 * one["heads"] * one["head_dim"] * pairs

    @property
    def bytes(self) -> float:
        """Bytes that must be read: K and V, or both matrices."""
        one, width = self.shape, _BYTES[self.dtype]
        if self.op == "gemm":
            return float(width * (one["m"] * one["k"] + one["k"] * one["n"]))
        return float(2 * width * one["kv_heads"] * one["head_dim"] * one["context"] * one.get("rows", 1))

    def beats(self, device: DeviceShape) -> bool:
        """Whether the row is faster than the device can be."""
        streams = self.bytes > _CACHED_BYTES and self.bytes / self.seconds > device.bandwidth
        return self.seconds < _SHORTEST_S or self.flops / self.seconds > self._peak(device) or streams

    def crawls(self, device: DeviceShape) -> bool:
        """Whether the row is more than ten times slower than 100 us and the datasheet's time."""
        share = 1.0
        if self.op == "decode":
            blocks = self.shape["rows"] * self.shape["kv_heads"]
            share = min(1.0, blocks / (device.multiprocessors or _MULTIPROCESSORS))
        least = self.flops / self._peak(device) + self.bytes / (share * device.bandwidth)
        return self.seconds > _SLOW * (_SLOW_S + least)

    def _peak(self, device: DeviceShape) -> float:
        return device.flops * (2.0 if self.dtype == "fp8" else 1.0)


@dataclass(frozen=True)
class OperatorTable:
    """The rows of a file for one device; how many were too fast (`dropped`) and too slow (`slow`), by operator."""

    file: str
    digest: str
    device: str
    rows: tuple[OperatorRow, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    slow: Mapping[str, int] = field(default_factory=dict)


def read_operators(path: str, device: DeviceShape) -> OperatorTable:
    """The rows of the CSV for `device`, without those that are faster than it can be, or absurdly slow.

    Raises:
        ConfigError: the file cannot be read, a row is malformed (file, line and column are named), or no row is of the
            device.
    """
    file, text = _text(path)
    rows = list(_rows(file, text))
    mine = [row for row in rows if row.device == device.name.lower()]
    if not mine:
        found = ", ".join(sorted({row.device for row in rows})) or "none"
        raise ConfigError(KEY, f"{file}: no row of device {device.name}; its devices are: {found}")
    fast = [row for row in mine if row.beats(device)]
    kept = _once(file, [row for row in mine if not row.beats(device)])
    slow = _slow(kept, device)
    kept = tuple(row for row in kept if row.line not in slow)
    counts = _counted(fast), _counted([row for row in mine if row.line in slow])
    return OperatorTable(str(file), _digest(text), device.name, kept, *counts)


def _counted(rows: Sequence[OperatorRow]) -> dict[str, int]:
    return {op: count for op in _SHAPES if (count := sum(row.op == op for row in rows))}


def _slow(rows: Sequence[OperatorRow], device: DeviceShape) -> set[int]:
    """The lines of rows that are absurdly slow, by the device's rates or beside larger rows of the same operator."""
    found = {row.line for row in rows if row.crawls(device)}
    alike: dict[tuple[object, ...], list[OperatorRow]] = {}
    for row in rows:
        if row.line not in found:
            alike.setdefault((row.op, row.dtype, *row.fixed), []).append(row)
    for some in alike.values():
        sizes = np.array([row.sizes for row in some])
        seconds = np.array([row.seconds for row in some])
        for row, size in zip(some, sizes, strict=True):
            larger = np.all(sizes >= size, axis=1)
            faster = larger & (seconds * _OUT_OF_LINE < row.seconds)
            if np.count_nonzero(faster) >= _WITNESSES:
                found.add(row.line)
    return found


def operators_digest(path: str) -> str:
    """A digest of the file's content. Raises ConfigError where it cannot be read."""
    return _digest(_text(path)[1])


def _text(path: str) -> tuple[Path, str]:
    file = Path(path).expanduser()
    try:
        return file, file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(KEY, f"cannot read '{file}': {error}") from None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _rows(file: Path, text: str) -> Iterator[OperatorRow]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    missing = {"device", "op", "us"} - set(reader.fieldnames or ())
    if missing:
        raise ConfigError(KEY, f"{file}:1: no column {', '.join(sorted(missing))}")
    for cells in reader:
        line = reader.line_num
        if None in cells:
            raise _error(
                file, line, "row", f"longer than the header's {len(reader.fieldnames or ())} columns"
            )
        yield _row(file, line, {key: (value or "").strip() for key, value in cells.items()})


def _once(file: Path, rows: Sequence[OperatorRow]) -> tuple[OperatorRow, ...]:
    """The rows without repetitions; raises ConfigError where two give one operator different times."""
    known: dict[tuple[object, ...], OperatorRow] = {}
    for row in rows:
        first = known.setdefault((row.op, row.dtype, *row.shape.values()), row)
        if first.seconds != row.seconds:
            raise _error(
                file,
                row.line,
                "us",
                f"{row.seconds * 1e6:g}, but line {first.line} gives the same operator {first.seconds * 1e6:g}",
            )
    return tuple(known.values())


def _row(file: Path, line: int, row: Mapping[str, str]) -> OperatorRow:
    op, dtype = row["op"], row.get("dtype") or "bf16"
    if op not in _SHAPES:
        raise _error(file, line, "op", f"{op!r}, must be one of {', '.join(_SHAPES)}")
    if dtype not in _BYTES:
        raise _error(file, line, "dtype", f"{dtype!r}, must be one of {', '.join(_BYTES)}")
    shape = {}
    for name in _SHAPES[op]:
        value = row.get(name, "")
        if not value.isdecimal() or not int(value):
            raise _error(file, line, name, f"{value!r}, must be a whole number of at least 1")
        shape[name] = int(value)
    try:
        seconds = float(row["us"]) * 1e-6
    except ValueError:
        raise _error(file, line, "us", f"{row['us']!r}, must be a number of microseconds") from None
    if not (isfinite(seconds) and seconds > 0):
        raise _error(file, line, "us", f"{row['us']!r}, must be greater than 0")
    if op == "prefill" and shape["tokens"] > shape["context"]:
        raise _error(
            file, line, "context", f"{shape['context']}, less than the chunk's {shape['tokens']} tokens"
        )
    return OperatorRow(row["device"].lower(), op, dtype, shape, seconds, line)


def _error(file: Path, line: int, column: str, found: str) -> ConfigError:
    return ConfigError(KEY, f"{file}:{line}: {column} is {found}")
