"""A cost model with attention and matrix products from a CSV of timed operators; the roofline prices all else.

The table is keyed by the device's name and needs no calibration of this machine. One row is one operator of one layer
on one device, with the columns that it has:

    device, op,      dtype, rows, tokens, context, heads, kv_heads, head_dim, m, n, k, us
    h100,   decode,  bf16,  64,   ,       4096,    32,    8,        128,       ,  ,  , 95.1
    h100,   prefill, bf16,  ,     512,    2048,    32,    8,        128,       ,  ,  , 88.0
    h100,   gemm,    bf16,  ,     ,       ,        ,      ,         ,       256, 6144, 4096, 24.4

`decode`: `rows` sequences with `context` KV slots each. `prefill`: a chunk of `tokens`, the last of `context` slots.
`gemm`: [m, k] by [k, n]. `dtype` is that of the KV, or of both matrices; bf16 where the column is absent.

A row that is faster than the device can be is left out and counted: more FLOP/s than the peak, or more bytes/s than the
bandwidth where the bytes do not fit a GPU's caches.
"""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, log
from pathlib import Path

import numpy as np

from harness.config.errors import ConfigError
from harness.cost.grid import Grid, GridError, TimedShape, interpolated_grid, shape_errors
from harness.cost.model_shape import ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import feature_index
from harness.replay.streaming import GridHull

KEY = "cost.operators"
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "decode": ("rows", "context", "heads", "kv_heads", "head_dim"),
    "prefill": ("tokens", "context", "heads", "kv_heads", "head_dim"),
    "gemm": ("m", "n", "k"),
}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_CACHED_BYTES = 128e6  # the largest level-2 cache of the GPUs that have a preset (RTX PRO 6000)
_ANY_BLOCK = 16  # the tables have no block size; a grid needs one
_ROWS, _KV, _CHUNKS, _TOKENS, _CHUNK_KV = feature_index(
    ("decode_rows", "decode_kv", "prefill_rows", "prefill_tokens", "prefill_kv")
)
_ALL_TOKENS, _SAMPLED = feature_index(("tokens", "sampled_rows"))


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
        peak = device.flops * (2.0 if self.dtype == "fp8" else 1.0)
        streams = self.bytes > _CACHED_BYTES and self.bytes / self.seconds > device.bandwidth
        return self.flops / self.seconds > peak or streams


@dataclass(frozen=True)
class OperatorTable:
    """The rows of a file for one device; `dropped` counts by operator those that were faster than it can be."""

    file: str
    digest: str
    device: str
    rows: tuple[OperatorRow, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)


def read_operators(path: str, device: DeviceShape) -> OperatorTable:
    """The rows of the CSV for `device`, without those that are faster than it can be.

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
    dropped = {op: count for op in _SHAPES if (count := sum(row.op == op for row in fast))}
    kept = _once(file, [row for row in mine if not row.beats(device)])
    return OperatorTable(str(file), _digest(text), device.name, kept, dropped)


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


class Products:
    """Seconds of a matrix product by its number of tokens, log-log between timed ones; NaN outside of them."""

    def __init__(self, timed: Mapping[int, float]) -> None:
        self._m = np.log(np.array(sorted(timed), dtype=np.float64))
        self._s = np.log(np.array([timed[m] for m in sorted(timed)]))

    def at(self, tokens: Amount) -> Amount:
        """Seconds for so many tokens."""
        if isinstance(tokens, np.ndarray):
            found: FloatArray = np.array([self._one(float(each)) for each in tokens])
            return found
        return self._one(float(tokens))

    def _one(self, tokens: float) -> float:
        place = log(tokens) if tokens > 0 else -np.inf
        if place < self._m[0] or place > self._m[-1] + 1e-12:
            return float("nan")
        return float(np.exp(np.interp(place, self._m, self._s)))


class OperatorCost:
    """Attention from the timed decodes and chunks, dense layers from the timed products, all else from the roofline.

    A step's decode rows have their mean length, and so have its chunks. Shapes outside of the timed ones are priced by
    the roofline and counted as extrapolated. Dense layers come from the table where every matrix of the model was
    timed; the others are priced by the roofline.
    """

    def __init__(self, roofline: RooflineCost, table: OperatorTable) -> None:
        self._roofline = roofline
        model, device = roofline.model, roofline.device
        rows = [row for row in table.rows if row.op == "gemm" or _geometry(row) == geometry_of(model, device)]
        decode, prefill = _shapes(rows, "decode", "rows"), _shapes(rows, "prefill", "tokens")
        self._decode, self._prefill = _grid(decode), _grid(prefill)
        if self._decode is None:
            raise ConfigError(KEY, _no_decode(table, model, device))
        self._layers = model.layers
        self._layer_products, self._output = _products(rows, model, device)
        self.source = _source(self, table, decode, prefill)

    @property
    def grids(self) -> tuple[Grid | None, Grid | None]:
        """Of decodes and of chunks; one layer."""
        return self._decode, self._prefill

    @property
    def has_products(self) -> bool:
        """Whether dense layers come from the table."""
        return bool(self._layer_products)

    @property
    def roofline(self) -> RooflineCost:
        """What prices all else."""
        return self._roofline

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds of the step and of its attention."""
        parts, fixed = self._roofline.parts(features), self._roofline.attention_fixed
        rows, chunks = features[_ROWS], features[_CHUNKS]
        decodes = self._decodes(features, _where(rows, parts.decodes + fixed(rows)))
        prompts = self._chunks(features, _where(chunks, parts.prompts + fixed(chunks)))
        attention = decodes + prompts
        dense = self._dense(features, parts.dense)
        return Price(self._roofline.total(features, dense, attention), attention)

    def _decodes(self, features: Sequence[Amount], otherwise: Amount) -> Amount:
        rows, kv = features[_ROWS], features[_KV]
        if self._decode is None or not np.any(rows):
            return otherwise
        return _known(rows, self._decode.at(rows, kv / _some(rows)) * self._layers, otherwise)

    def _chunks(self, features: Sequence[Amount], otherwise: Amount) -> Amount:
        chunks = features[_CHUNKS]
        if self._prefill is None or not np.any(chunks):
            return otherwise
        tokens, context = features[_TOKENS] / _some(chunks), features[_CHUNK_KV] / _some(chunks)
        return _known(chunks, self._prefill.at(tokens, context) * chunks * self._layers, otherwise)

    def _dense(self, features: Sequence[Amount], otherwise: Amount) -> Amount:
        if not self._layer_products or self._output is None:
            return otherwise
        tokens, sampled = features[_ALL_TOKENS], features[_SAMPLED]
        total: Amount = 0.0
        for product in self._layer_products:
            total = total + product.at(tokens) * self._layers
        # A product of no row takes nothing; its price at one row is not used.
        found = total + _where(sampled, self._output.at(_some(sampled)))
        return _known(tokens, found, otherwise)


def geometry_of(model: ModelShape, device: DeviceShape) -> tuple[int, int, int, str]:
    """Heads, KV heads and head width on each device, and the KV's element type."""
    width = model.kv_bytes_per_element or model.bytes_per_element
    kv_heads = max(1, model.kv_heads // device.parallel)
    dtype = {1: "fp8", 2: "bf16", 4: "fp32"}[width]
    return model.heads // device.parallel, kv_heads, model.head_dim, dtype


def _geometry(row: OperatorRow) -> tuple[int, int, int, str]:
    dtype = "bf16" if row.dtype == "fp16" else row.dtype
    return row.shape["heads"], row.shape["kv_heads"], row.shape["head_dim"], dtype


def _shapes(rows: Sequence[OperatorRow], op: str, across: str) -> list[TimedShape]:
    return [
        TimedShape(row.shape[across], row.shape["context"], _ANY_BLOCK, row.seconds)
        for row in rows
        if row.op == op
    ]


def _grid(shapes: Sequence[TimedShape]) -> Grid | None:
    try:
        return interpolated_grid(shapes, _ANY_BLOCK)
    except GridError:
        return None


def _no_decode(table: OperatorTable, model: ModelShape, device: DeviceShape) -> str:
    heads, kv_heads, width, dtype = geometry_of(model, device)
    found = sorted({_geometry(row) for row in table.rows if row.op == "decode"})
    known = "; ".join(f"{a}/{b} heads of {c}, {d}" for a, b, c, d in found) or "none"
    return (
        f"{table.file}: {table.device} has no grid of decodes of {heads}/{kv_heads} heads of {width}, {dtype} "
        f"(it takes two rows and two contexts at least). It has: {known}"
    )


def _products(
    rows: Sequence[OperatorRow], model: ModelShape, device: DeviceShape
) -> tuple[list[Products], Products | None]:
    """The products of one layer and the output's; empty where the table lacks one, or layers are not plain."""
    width = {1: "fp8", 2: "bf16", 4: "fp32"}[model.bytes_per_element]
    timed: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        if row.op == "gemm" and row.dtype in (width, "fp16" if width == "bf16" else width):
            timed.setdefault((row.shape["n"], row.shape["k"]), {})[row.shape["m"]] = row.seconds
    plain = not (model.experts or model.latent or model.layer_bits)
    share, query = device.parallel, model.heads * model.head_dim
    mlp = model.intermediate // share
    layer = [
        ((query + 2 * model.kv_heads * model.head_dim) // share, model.hidden),
        (model.hidden, query // share),
        ((model.mlp_matrices - 1) * mlp, model.hidden),
        (model.hidden, mlp),
    ]
    output = (model.vocab // share, model.hidden)
    if not plain or any(pair not in timed for pair in (*layer, output)):
        return [], None
    return [Products(timed[pair]) for pair in layer], Products(timed[output])


def _some(count: Amount) -> Amount:
    """At least one, to divide by."""
    return np.maximum(count, 1) if isinstance(count, np.ndarray) else max(count, 1)


def _where(count: Amount, value: Amount) -> Amount:
    """`value` where `count` is not zero, else 0."""
    if isinstance(count, np.ndarray):
        found: FloatArray = np.where(count > 0, value, 0.0)
        return found
    return value if count else 0.0


def _known(count: Amount, found: Amount, otherwise: Amount) -> Amount:
    """`found`, or `otherwise` where it is NaN or `count` is zero."""
    if isinstance(found, np.ndarray) or isinstance(otherwise, np.ndarray):
        return np.where(np.isnan(found) | (np.asarray(count) == 0), otherwise, found)
    return otherwise if found != found or not count else float(found)


def _source(
    cost: OperatorCost, table: OperatorTable, decode: Sequence[TimedShape], prefill: Sequence[TimedShape]
) -> CostSource:
    errors = shape_errors("decode", decode, ("rows", "KV slots a row"))
    hull = GridHull({"rows": (0.0, max(shape.across for shape in decode))})
    hull.decode, hull.prefill = cost.grids
    if hull.prefill is not None:
        errors |= shape_errors("prefill", prefill, ("tokens", "KV slots"))
    other = cost.roofline.source
    facts = {
        "what": "attention (and dense layers) from timed operators, all else from datasheet rates and fixed times",
        "table": f"{table.file} ({table.digest})",
        "decode shapes": len(decode),
        "prefill shapes": len(prefill) if hull.prefill is not None else "too few for a grid: by the roofline",
        "dense layers": "from the table"
        if cost.has_products
        else "by the roofline: not every matrix was timed",
        "rows faster than the device": "; ".join(f"{n} {op}" for op, n in table.dropped.items()) or "none",
    }
    return CostSource(
        kind="operators",
        name=table.device,
        fingerprint=f"operators:{table.digest}:{other.fingerprint}",
        provenance={**other.provenance, **facts},
        heldout=errors,
        hull=hull,
    )
