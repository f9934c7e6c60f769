"""A cost model with attention and matrix products from a table of timed operators; the roofline prices all else."""

from collections.abc import Mapping, Sequence
from math import log

import numpy as np

from harness.config.errors import ConfigError
from harness.cost.decode_form import AttentionMachine, decode_errors, decode_grid
from harness.cost.grid import Grid, GridError, TimedShape, interpolated_grid, shape_errors
from harness.cost.model_shape import ModelShape
from harness.cost.operator_table import KEY, OperatorRow, OperatorTable
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import feature_index
from harness.replay.streaming import GridHull

_ANY_BLOCK = 16  # the tables have no block size; a grid needs one
_ROWS, _KV, _CHUNKS, _TOKENS, _CHUNK_KV = feature_index(
    ("decode_rows", "decode_kv", "prefill_rows", "prefill_tokens", "prefill_kv")
)
_ALL_TOKENS, _SAMPLED = feature_index(("tokens", "sampled_rows"))


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
        self._machine = attention_machine(model, device)
        try:
            self._decode = decode_grid(decode, self._machine)
        except GridError:
            raise ConfigError(KEY, _no_decode(table, model, device)) from None
        self._prefill = _grid(prefill)
        self._layers = model.layers
        self._layer_products, self._output = _products(rows, model, device)
        self.source = _source(self, table, decode, prefill)

    @property
    def grids(self) -> tuple[Grid | None, Grid | None]:
        """Of decodes and of chunks; one layer."""
        return self._decode, self._prefill

    @property
    def machine(self) -> AttentionMachine:
        """What the decode grid was interpolated with."""
        return self._machine

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
        if not np.any(rows):
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


def _listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {op}" for op, count in counts.items()) or "none"


def _source(
    cost: OperatorCost, table: OperatorTable, decode: Sequence[TimedShape], prefill: Sequence[TimedShape]
) -> CostSource:
    errors = decode_errors(decode, cost.machine)
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
        "rows faster than the device": _listed(table.dropped),
        "rows absurdly slow": _listed(table.slow),
    }
    return CostSource(
        kind="operators",
        name=table.device,
        fingerprint=f"operators:{table.digest}:{other.fingerprint}",
        provenance={**other.provenance, **facts},
        heldout=errors,
        hull=hull,
    )
