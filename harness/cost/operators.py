"""A cost model with attention and matrix products from a CSV of timed operators; the roofline prices all else.

The file is keyed by the device's name and needs no calibration of this machine. One row is one operator of one layer
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

Between the timed decodes a form is fitted. It is, in microseconds, for `rows` sequences with `slots` KV slots each:

    (a0 + a1 [rows > 1] + a2 [slots > 128]) / clock
      + ((w x waves)^p + (bytes x (out / memory + (1 - out) / chip))^p)^(1/p)

* `chip` = r x multiprocessors: each of them reads at most `r`. `memory` = the smaller of that and eta x bandwidth.
* `waves` = ceil(rows x KV heads / multiprocessors): a kernel has a thread block for each row and KV head, and a wave of
  them takes as long as one. Above 128 slots (a tile of FlashAttention) a row is split, and the parts are combined.
* `out` is the share of the KV that does not stay in the L2 cache, which a table
  that times the same KV again and again reads from there: nearly 0 below the cache's size, nearly 1 above.
* Fixed times go with the boost clock; the time of a wave and `r` do not.

The ratio of a timed shape to the fitted form is smooth, where the time itself has cliffs. So the ratio is interpolated,
exactly at timed shapes, over logarithms of rows, slots and of their product, on which the cliffs lie.
"""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import numpy as np

from harness.config.errors import ConfigError
from harness.cost import grid
from harness.cost.model_shape import ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import AT
from harness.replay.folds import GridHull

KEY = "cost.operators"
_HEADS = ("heads", "kv_heads", "head_dim")
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "decode": ("rows", "context", *_HEADS),
    "prefill": ("tokens", "context", *_HEADS),
    "gemm": ("m", "n", "k"),
}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_CACHED_BYTES = 128e6  # the largest level-2 cache of the GPUs that have a preset (RTX PRO 6000)
_MULTIPROCESSORS = 100  # of a device that does not say
_SHORTEST_S = 0.5e-6  # no kernel takes less
_SLOW_S, _SLOW = 100e-6, 10.0  # the slowest that is kept: ten times (100 us + the datasheet's time)
_OUT_OF_LINE, _LARGER_ROWS = 3.0, 2  # or three times as long as two rows that are at least as large


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
        return tuple(value for name, value in self.shape.items() if name not in _HEADS)

    @property
    def fixed(self) -> tuple[int, ...]:
        """Heads, KV heads and head width, where it has them."""
        return tuple(value for name, value in self.shape.items() if name in _HEADS)

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

    def is_impossibly_fast(self, device: DeviceShape) -> bool:
        """Whether the row is faster than the device can be."""
        streams = self.bytes > _CACHED_BYTES and self.bytes / self.seconds > device.bandwidth
        return self.seconds < _SHORTEST_S or self.flops / self.seconds > self._peak(device) or streams

    def is_implausibly_slow(self, device: DeviceShape) -> bool:
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
    file, text, digest = _text(path)
    rows = list(_rows(file, text))
    mine = [row for row in rows if row.device == device.name.lower()]
    if not mine:
        found = ", ".join(sorted({row.device for row in rows})) or "none"
        raise ConfigError(KEY, f"{file}: no row of device {device.name}; its devices are: {found}")
    fast = [row for row in mine if row.is_impossibly_fast(device)]
    kept = _once(file, [row for row in mine if not row.is_impossibly_fast(device)])
    slow = _slow(kept, device)
    kept = tuple(row for row in kept if row.line not in slow)
    counts = _counted(fast), _counted([row for row in mine if row.line in slow])
    return OperatorTable(str(file), digest, device.name, kept, *counts)


def _counted(rows: Sequence[OperatorRow]) -> dict[str, int]:
    return {op: count for op in _SHAPES if (count := sum(row.op == op for row in rows))}


def _slow(rows: Sequence[OperatorRow], device: DeviceShape) -> set[int]:
    """The lines of rows that are absurdly slow, by the device's rates or beside larger rows of the same operator."""
    found = {row.line for row in rows if row.is_implausibly_slow(device)}
    alike: dict[tuple[object, ...], list[OperatorRow]] = {}
    for row in rows:
        if row.line not in found:
            alike.setdefault((row.op, row.dtype, *row.fixed), []).append(row)
    for some in alike.values():
        sizes = np.array([row.sizes for row in some])
        seconds = np.array([row.seconds for row in some])
        for row, size in zip(some, sizes, strict=True):
            faster = np.all(sizes >= size, axis=1) & (seconds * _OUT_OF_LINE < row.seconds)
            if np.count_nonzero(faster) >= _LARGER_ROWS:
                found.add(row.line)
    return found


def operators_digest(path: str) -> str:
    """A digest of the file's content. Raises ConfigError where it cannot be read."""
    return _text(path)[2]


def _text(path: str) -> tuple[Path, str, str]:
    """The file, its text, and the digest of the text."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(KEY, f"cannot read '{file}': {error}") from None
    return file, text, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _rows(file: Path, text: str) -> Iterator[OperatorRow]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    missing = {"device", "op", "us"} - set(reader.fieldnames or ())
    if missing:
        raise ConfigError(KEY, f"{file}:1: no column {', '.join(sorted(missing))}")
    for cells in reader:
        line = reader.line_num
        if None in cells:
            columns = len(reader.fieldnames or ())
            raise _error(file, line, "row", f"longer than the header's {columns} columns")
        yield _row(file, line, {key: (value or "").strip() for key, value in cells.items()})


def _once(file: Path, rows: Sequence[OperatorRow]) -> tuple[OperatorRow, ...]:
    """The rows without repetitions; raises ConfigError where two give one operator different times."""
    known: dict[tuple[object, ...], OperatorRow] = {}
    for row in rows:
        first = known.setdefault((row.op, row.dtype, *row.shape.values()), row)
        if first.seconds != row.seconds:
            other = f"but line {first.line} gives the same operator {first.seconds * 1e6:g}"
            raise _error(file, row.line, "us", f"{row.seconds * 1e6:g}, {other}")
    return tuple(known.values())


def _row(file: Path, line: int, row: Mapping[str, str]) -> OperatorRow:
    op, dtype = row["op"], row.get("dtype") or "bf16"
    for name, value, allowed in (("op", op, _SHAPES), ("dtype", dtype, _BYTES)):
        if value not in allowed:
            raise _error(file, line, name, f"{value!r}, must be one of {', '.join(allowed)}")
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
        found = f"{shape['context']}, less than the chunk's {shape['tokens']} tokens"
        raise _error(file, line, "context", found)
    return OperatorRow(row["device"].lower(), op, dtype, shape, seconds, line)


def _error(file: Path, line: int, column: str, found: str) -> ConfigError:
    return ConfigError(KEY, f"{file}:{line}: {column} is {found}")


START = (12.0, 1.0, 1.0, 3.0, 0.9, 20.0, 1.1, 0.05, 2.0)
LOW = (0.0, 0.0, 0.0, 0.1, 0.5, 5.0, 0.9, 0.02, 1.0)
# Of a0, a1, a2, w, eta, r in GB/s, size and width of the transition in L2 caches, p.
HIGH = (50.0, 20.0, 20.0, 10.0, 1.1, 150.0, 1.27, 0.1, 8.0)
_EACH, _SIZE = 5, 6
_STARTS = (15.0, 40.0)  # of r: between them the error has several minima
_ANY_SIZE = (0.05, 4.0)  # of a cache that is not known
_TILE = 128
# With fewer shapes the form has too many constants, and logarithms of times are interpolated.
_FEWEST = 2 * len(START)
_UNKNOWN_PARALLEL, _UNKNOWN_CACHE, _UNKNOWN_CLOCK = 100.0, 50e6, 1.7


@dataclass(frozen=True)
class AttentionMachine:
    """What the form needs of a GPU and a model: bytes/s, bytes of a KV slot, KV heads; multiprocessors, L2 bytes, GHz.

    Of the last three 0 means not known: typical values stand in, and waves are not whole.
    """

    bandwidth: float
    slot_bytes: float
    kv_heads: int
    multiprocessors: int = 0
    cache: float = 0.0
    clock_ghz: float = 0.0


@dataclass(frozen=True)
class Timings:
    """Decode attention of one layer on one machine: rows, KV slots a row, microseconds, float64 `[timings]`."""

    machine: AttentionMachine
    rows: FloatArray
    slots: FloatArray
    us: FloatArray


def form_us(
    constants: FloatArray, machine: AttentionMachine, rows: FloatArray, slots: FloatArray
) -> FloatArray:
    """The form at many places, in microseconds."""
    first, several, split, wave, share, each, size, width, power = constants
    parallel = machine.multiprocessors or _UNKNOWN_PARALLEL
    blocks = rows * machine.kv_heads / parallel
    waves = np.ceil(blocks) if machine.multiprocessors else np.maximum(blocks, 1.0)
    read = rows * slots * machine.slot_bytes
    out = 1.0 / (1.0 + (read / ((machine.cache or _UNKNOWN_CACHE) * size)) ** (-1.0 / width))
    on_chip = 1e6 / (each * 1e9 * parallel)
    memory = max(on_chip, 1e6 / (share * machine.bandwidth))
    reading = read * (out * memory + (1.0 - out) * on_chip)
    fixed = (first + several * (rows > 1) + split * (slots > _TILE)) / (machine.clock_ghz or _UNKNOWN_CLOCK)
    us: FloatArray = fixed + ((wave * waves) ** power + reading**power) ** (1.0 / power)
    return us


def fitted_form(tables: Sequence[Timings]) -> FloatArray:
    """The constants that make relative errors small, in which few large errors count little."""
    from scipy.optimize import least_squares

    def errors(constants: FloatArray) -> FloatArray:
        with np.errstate(over="ignore"):
            prices = [form_us(constants, one.machine, one.rows, one.slots) / one.us for one in tables]
        return np.concatenate(prices) - 1.0

    low, high = np.array(LOW), np.array(HIGH)
    if not all(one.machine.cache for one in tables):
        low[_SIZE], high[_SIZE] = _ANY_SIZE
    starts = ([*START[:_EACH], each, *START[_EACH + 1 :]] for each in _STARTS)
    fits = [least_squares(errors, one, bounds=(low, high), loss="soft_l1", f_scale=0.05) for one in starts]
    return np.asarray(min(fits, key=lambda fit: fit.cost).x, dtype=np.float64)


def decode_grid(shapes: Sequence[grid.TimedShape], machine: AttentionMachine) -> grid.Grid:
    """The grid of timed decodes of one block size, by the ratio to the form; NaN outside of the timed shapes.

    Raises:
        GridError: there are too few shapes for a grid, or they lie on one line.
    """
    plain = grid.interpolated_grid(shapes, shapes[0].block_size if shapes else 0)
    us = grid.medians((shape[:2], 1e6 * shape.seconds) for shape in shapes)
    if len(us) < _FEWEST:
        return plain
    places = np.array(list(us), dtype=np.float64)
    timed = Timings(machine, places[:, 0], places[:, 1], np.array(list(us.values())))
    from scipy.interpolate import RBFInterpolator

    form = fitted_form([timed])
    ratios = np.log(timed.us / form_us(form, machine, timed.rows, timed.slots))
    rows, slots = np.meshgrid(*plain.axes, indexing="ij")
    between = RBFInterpolator(_places(timed.rows, timed.slots), ratios, kernel="linear", degree=1)
    ratio = between(_places(rows.ravel(), slots.ravel())).reshape(rows.shape)
    seconds = 1e-6 * form_us(form, machine, rows, slots) * np.exp(ratio)
    return replace(plain, seconds=np.where(np.isnan(plain.seconds), np.nan, seconds))


def decode_errors(
    shapes: Sequence[grid.TimedShape], machine: AttentionMachine
) -> dict[str, dict[str, float]]:
    """Errors of `decode_grid` on shapes that it has not seen, by axis: every other value, then the others."""
    return grid.left_out_errors("decode", shapes, grid.DECODE_AXES, lambda few, _: decode_grid(few, machine))


def _places(rows: FloatArray, slots: FloatArray) -> FloatArray:
    """Coordinates in which the squared distance is that of log rows plus that of log slots plus that of their sum."""
    across, along = np.log2(rows), np.log2(slots)
    return np.stack([np.sqrt(2.0) * across + along / np.sqrt(2.0), np.sqrt(1.5) * along], axis=-1)


_ANY_BLOCK = 16  # the tables have no block size; a grid needs one


class OperatorCost:
    """Attention from the timed decodes and chunks, dense layers from the timed products, all else from the roofline.

    A step's decode rows have their mean length, and so have its chunks. Chunks of a few queries are priced as decodes
    of as many rows, and no lower than the roofline's products. Shapes outside of the timed ones are priced by the
    roofline and counted as extrapolated. Dense layers come from the table where every matrix of the model was timed;
    the others are priced by the roofline.
    """

    def __init__(self, roofline: RooflineCost, table: OperatorTable) -> None:
        self._roofline = roofline
        model, device = roofline.model, roofline.device
        rows = [row for row in table.rows if row.op == "gemm" or _geometry(row) == geometry_of(model, device)]
        decode, prefill = _shapes(rows, "decode", "rows"), _shapes(rows, "prefill", "tokens")
        self._machine = attention_machine(model, device)
        try:
            self._decode = decode_grid(decode, self._machine)
        except grid.GridError:
            raise ConfigError(KEY, _no_decode(table, model, device)) from None
        self._prefill: grid.Grid | None = None
        with suppress(grid.GridError):
            self._prefill = grid.interpolated_grid(prefill, _ANY_BLOCK)
        self._layers = model.layers
        self._layer_products, self._output = _products(rows, model, device)
        self.source = self._source(table, decode, prefill)

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds of the step and of its attention."""
        parts, fixed = self._roofline.parts(features), self._roofline.attention_fixed
        rows, chunks = features[AT.decode_rows], features[AT.prefill_rows]
        decodes = self._decodes(features, grid.where_any(rows, parts.decodes + fixed(rows)))
        prompts = self._chunks(features, parts.prompts, grid.where_any(chunks, parts.prompts + fixed(chunks)))
        attention = decodes + prompts
        dense = self._dense(features, parts.dense)
        return Price(self._roofline.total(features, dense, attention), attention)

    def _decodes(self, features: Sequence[Amount], otherwise: Amount) -> Amount:
        rows, kv = features[AT.decode_rows], features[AT.decode_kv]
        if not np.any(rows):
            return otherwise
        found = self._decode.at(rows, kv / grid.some(rows)) * self._layers
        return grid.where_any(rows, grid.where_known(found, otherwise), otherwise)

    def _chunks(self, features: Sequence[Amount], least: Amount, otherwise: Amount) -> Amount:
        chunks, found = features[AT.prefill_rows], otherwise
        if self._prefill is not None and np.any(chunks):
            tokens, context = (features[at] / grid.some(chunks) for at in (AT.prefill_tokens, AT.prefill_kv))
            timed = self._prefill.at(tokens, context) * chunks * self._layers
            found = grid.where_any(chunks, grid.where_known(timed, otherwise), otherwise)

        def decode(rows: Amount, slots: Amount) -> Amount:
            return self._decode.at(rows, slots) * self._layers

        return grid.short_as_decodes(features, decode, least, found)

    def _dense(self, features: Sequence[Amount], otherwise: Amount) -> Amount:
        if not self._layer_products or self._output is None:
            return otherwise
        tokens, sampled = features[AT.tokens], features[AT.sampled_rows]
        total: Amount = 0.0
        for product in self._layer_products:
            total = total + product.at(tokens) * self._layers
        # A product of no row takes nothing; its price at one row is not used.
        found = total + grid.where_any(sampled, self._output.at(grid.some(sampled)))
        return grid.where_any(tokens, grid.where_known(found, otherwise), otherwise)

    def _source(
        self, table: OperatorTable, decode: Sequence[grid.TimedShape], prefill: Sequence[grid.TimedShape]
    ) -> CostSource:
        def listed(counts: Mapping[str, int]) -> str:
            return "; ".join(f"{count} {op}" for op, count in counts.items()) or "none"

        errors = decode_errors(decode, self._machine)
        hull = GridHull({"rows": (0.0, max(shape.across for shape in decode))})
        hull.decode, hull.prefill = self._decode, self._prefill
        if hull.prefill is not None:
            errors |= grid.shape_errors("prefill", prefill, ("tokens", "KV slots"))
        other = self._roofline.source
        facts = {
            "what": "attention (and dense layers) from timed operators, all else from datasheet rates and fixed times",
            "table": f"{table.file} ({table.digest})",
            "decode shapes": len(decode),
            "prefill shapes": len(prefill)
            if hull.prefill is not None
            else "too few for a grid: by the roofline",
            "dense layers": "from the table"
            if self._layer_products
            else "by the roofline: not every matrix was timed",
            "rows faster than the device": listed(table.dropped),
            "rows absurdly slow": listed(table.slow),
        }
        return CostSource(
            kind="operators",
            name=table.device,
            fingerprint=f"operators:{table.digest}:{other.fingerprint}",
            provenance={**other.provenance, **facts},
            heldout=errors,
            hull=hull,
        )


def attention_machine(model: ModelShape, device: DeviceShape) -> AttentionMachine:
    """The device and the model's attention on it, as the form of decode attention needs them."""
    _, kv_heads, head_dim, dtype = geometry_of(model, device)
    width = {"fp8": 1, "bf16": 2, "fp32": 4}[dtype]
    return AttentionMachine(
        *(device.bandwidth, 2.0 * kv_heads * head_dim * width, kv_heads),
        *(device.multiprocessors, device.cache, device.clock_ghz),
    )


def geometry_of(model: ModelShape, device: DeviceShape) -> tuple[int, int, int, str]:
    """Heads, KV heads and head width on each device, and the KV's element type."""
    width = model.kv_bytes_per_element or model.bytes_per_element
    kv_heads = max(1, model.kv_heads // device.parallel)
    dtype = {1: "fp8", 2: "bf16", 4: "fp32"}[width]
    return model.heads // device.parallel, kv_heads, model.head_dim, dtype


def _geometry(row: OperatorRow) -> tuple[int, int, int, str]:
    dtype = "bf16" if row.dtype == "fp16" else row.dtype
    return row.shape["heads"], row.shape["kv_heads"], row.shape["head_dim"], dtype


def _shapes(rows: Sequence[OperatorRow], op: str, across: str) -> list[grid.TimedShape]:
    mine = (row for row in rows if row.op == op)
    return [grid.TimedShape(row.shape[across], row.shape["context"], _ANY_BLOCK, row.seconds) for row in mine]


def _no_decode(table: OperatorTable, model: ModelShape, device: DeviceShape) -> str:
    def words(geometry: tuple[int, int, int, str]) -> str:
        return "{}/{} heads of {}, {}".format(*geometry)

    held = {_geometry(row) for row in table.rows if row.op == "decode"}
    known = "; ".join(map(words, sorted(held))) or "none"
    lacks = f"{table.device} has no grid of decodes of {words(geometry_of(model, device))}"
    return f"{table.file}: {lacks} (it takes two rows and two contexts at least). It has: {known}"


def _products(
    rows: Sequence[OperatorRow], model: ModelShape, device: DeviceShape
) -> tuple[list[grid.LogGrid], grid.LogGrid | None]:
    """The products of one layer and the output's; empty where the table lacks one, or layers are not plain."""
    width = {1: "fp8", 2: "bf16", 4: "fp32"}[model.bytes_per_element]
    timed: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        if row.op == "gemm" and row.dtype in (width, "fp16" if width == "bf16" else width):
            timed.setdefault((row.shape["n"], row.shape["k"]), {})[row.shape["m"]] = row.seconds
    plain = not (model.experts or model.latent or model.layer_bits)
    heads, kv_heads, head_dim, _ = geometry_of(model, device)  # KV heads are repeated beyond their number
    mlp = model.intermediate // device.parallel
    layer = [
        ((heads + 2 * kv_heads) * head_dim, model.hidden),
        (model.hidden, heads * head_dim),
        ((model.mlp_matrices - 1) * mlp, model.hidden),
        (model.hidden, mlp),
    ]
    output = (model.vocab // device.parallel, model.hidden)
    if not plain or any(pair not in timed for pair in (*layer, output)):
        return [], None
    grids = {
        pair: grid.LogGrid([sorted(times)], np.array([times[m] for m in sorted(times)]))
        for pair, times in timed.items()
    }
    return [grids[pair] for pair in layer], grids[output]
