"""The table model with attention from `bench kernels`.

The timed kernels of the point's geometry, device and threads give the grid. A calibration gives all other costs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.errors import ConfigError
from harness.cost import grid
from harness.cost.fitted import FittedCost
from harness.cost.table import EngineOverhead, TableCost, engine_overhead, with_overhead
from harness.cost.timings import NATIVE, OURS, KernelRun, KernelRunError, read_run, table_file
from harness.environment import kernel_digest
from harness.replay.cost_model import CostSource
from harness.replay.features import ATTENTION_FEATURES
from harness.replay.folds import GridHull

KEY = "cost.kernels"


class KernelTableError(ConfigError):
    """Timings that do not fit a point's attention; the message names the existing ones, and how to time others."""


class Geometry(NamedTuple):
    """The heads, element type and device of an attention call."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    threads: int

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        shape = f"{self.heads} query and {self.kv_heads} KV heads of {self.head_dim}, {self.dtype}"
        return f"{shape}, on {self.device}{threads}"


@dataclass(frozen=True)
class TimedAttention:
    """The attention that a point asks for: `kernels` names the run of `bench kernels` that has its timings.

    With `native` the engine runs its compiled kernels where they serve, else ours on a device.
    """

    kernels: str
    geometry: Geometry
    block_size: int
    layers: int
    native: bool

    def provider(self, row: Mapping[str, Any]) -> str:
        """The provider that the engine uses for a row."""
        served = row["dtype"] in ("fp32", "bf16") and row["head_dim"] % 16 == 0  # paged_kernels.backends
        return NATIVE if self.native and served else OURS


@dataclass(frozen=True)
class KernelShapes:
    """Timed shapes of a point's geometry: decodes (rows, KV slots a row) and chunks (tokens, KV slots); one layer."""

    run: KernelRun
    geometry: Geometry
    block_size: int
    decode: tuple[grid.TimedShape, ...]
    prefill: tuple[grid.TimedShape, ...]

    def of_layers(self, layers: int) -> "KernelShapes":
        """The shapes with the seconds of `layers` layers."""
        decode, prefill = (
            tuple(shape._replace(seconds=layers * shape.seconds) for shape in shapes)
            for shapes in (self.decode, self.prefill)
        )
        return replace(self, decode=decode, prefill=prefill)

    def decode_grid(self) -> grid.Grid:
        """The decode grid at the point's block size.

        Raises:
            KernelTableError: the shapes make no grid.
        """
        try:
            return grid.interpolated_grid(self.decode, self.block_size)
        except grid.GridError as error:
            found = f"decodes in {self.run.file}, {self.geometry}: {error}"
            raise KernelTableError(KEY, f"{found}. {_advice(self.geometry, self.block_size)}") from error

    def prefill_grid(self) -> grid.Grid | None:
        """The grid of chunks; None where there are too few shapes, so that the fitted model prices chunks."""
        with suppress(grid.GridError):
            return grid.interpolated_grid(self.prefill, self.block_size)
        return None


def kernel_shapes(asked: TimedAttention) -> KernelShapes:
    """The timings that fit the point's attention.

    Raises:
        KernelTableError: they cannot be read, or none fits.
    """
    run, wanted, size = read_kernels(asked.kernels), asked.geometry, asked.block_size
    # A grid needs equal lengths, no shared prefix, and the engine's layout.
    even = (row for row in run.rows if not (row["ragged"] or row["shared_prefix"]) and row["layout"] == "NHD")
    plain = [row for row in even if row["provider"] in (OURS, NATIVE)]
    mine = [row for row in plain if _geometry(row) == wanted and row["provider"] == asked.provider(row)]
    if not any(row["queries"] == 1 for row in mine):
        whose = asked.provider({"queries": 1, "dtype": wanted.dtype, "head_dim": wanted.head_dim})
        lacks = f"no decode in {run.file} is of {wanted}, by '{whose}', which the engine runs there"
        raise KernelTableError(KEY, f"{lacks}. {_existing(plain)}. {_advice(wanted, size)}")
    decode = tuple(_shape(row, row["batch"], row["median_us"]) for row in mine if row["queries"] == 1)
    return KernelShapes(run, wanted, size, decode, tuple(_chunks(mine)))


def read_kernels(named: str) -> KernelRun:
    """The run of `bench kernels` that `cost.kernels` names.

    Raises:
        KernelTableError: it cannot be read.
    """
    try:
        file = table_file(named)
        return _read_once(file, file.stat().st_mtime_ns)
    except KernelRunError as error:
        raise KernelTableError(KEY, str(error)) from error


@lru_cache(maxsize=8)
def _read_once(file: Path, changed_ns: int) -> KernelRun:
    """Read a file once for all points; a new `changed_ns` makes the cache read it again."""
    del changed_ns
    return read_run(file)


def _geometry(row: Mapping[str, Any]) -> Geometry:
    return Geometry(*(row[name] for name in Geometry._fields))


def _shape(row: Mapping[str, Any], across: int, us: float) -> grid.TimedShape:
    return grid.TimedShape(across, row["context"], row["block_size"], us * 1e-6)


def _chunks(rows: Iterable[Mapping[str, Any]]) -> Iterable[grid.TimedShape]:
    """Seconds per chunk, from the call with the fewest chunks, since a step of the engine seldom has more than one."""
    best: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for row in rows:
        if row["queries"] > 1:
            key = row["queries"], row["context"], row["block_size"]
            best[key] = min(best.get(key, row), row, key=lambda one: int(one["batch"]))
    for row in best.values():
        yield _shape(row, row["queries"], row["median_us"] / row["batch"])


def _existing(rows: Iterable[Mapping[str, Any]]) -> str:
    counts = Counter((row["provider"], _geometry(row)) for row in rows)
    if not counts:
        return "It holds no plain case of our own kernels at all"
    return "There are: " + "; ".join(
        f"{geometry} by {name} ({count})" for (name, geometry), count in counts.items()
    )


def _advice(wanted: Geometry, block_size: int) -> str:
    device = "cpu" if wanted.threads else "cuda"
    threads = f" --threads {wanted.threads}" if wanted.threads > 1 else ""
    return (
        f"Time them on the machine that is predicted, with: python -m harness bench kernels --device {device}{threads} "
        f"--heads {wanted.heads}/{wanted.kv_heads} --head-dim {wanted.head_dim} --dtype {wanted.dtype} "
        f"--batch 1,4,16,64 --context 64,256,1024 --block-size {block_size} --queries 1 "
        "(--queries 1,16,64 times chunks of prompts too)"
    )


def kernel_table(asked: TimedAttention, fitted: FittedCost) -> TableCost:
    """Attention of all layers from timed calls; `fitted` prices shapes outside, and all else.

    A timed call is the kernel alone. The engine's overhead is the calibrated time minus the kernel's
    (`harness.cost.table.engine_overhead`).

    Raises:
        KernelTableError: the timings do not fit the point's attention.
    """
    shapes = kernel_shapes(asked).of_layers(asked.layers)
    size = shapes.block_size
    timed = grid.seconds_at_block_size(shapes.decode, size)
    extra = engine_overhead(timed, partial(_decode_in_engine, fitted, size))
    decode, prefill = with_overhead(shapes.decode_grid(), extra), shapes.prefill_grid()
    more = None
    if prefill is not None:
        timed = grid.seconds_at_block_size(shapes.prefill, size)
        more = engine_overhead(timed, partial(_chunk_in_engine, fitted, size))
        prefill = with_overhead(prefill, more)
    source = _source(shapes, fitted.source, (decode, prefill), (extra, more))
    return TableCost(fitted, decode, prefill, size, source, own_tokens=True)


def _decode_in_engine(fitted: FittedCost, block_size: int, rows: float, slots: float) -> float | None:
    """Calibrated attention of `rows` equal decode rows; None outside of what was measured."""
    features = dict.fromkeys(ATTENTION_FEATURES, 0.0)
    features |= {"decode_rows": rows, "decode_steps": 1.0}
    features |= dict.fromkeys(("decode_kv", "decode_distinct_kv"), rows * slots)
    features |= {"decode_padded_kv": rows * slots, "decode_padded_blocks": rows * ceil(slots / block_size)}
    return _seconds(fitted, features) if _covered(fitted, rows, rows * slots) else None


def _chunk_in_engine(fitted: FittedCost, block_size: int, tokens: float, slots: float) -> float | None:
    """Calibrated attention of one chunk of `tokens`, the last of `slots`."""
    if slots < tokens:
        return None
    features = dict.fromkeys(ATTENTION_FEATURES, 0.0)
    features |= {"prefill_rows": 1.0, "prefill_tokens": tokens, "prefill_kv": slots}
    work = tokens * (slots - (tokens - 1) / 2)
    features |= {"prefill_blocks": ceil(slots / block_size), "prefill_work": work}
    return _seconds(fitted, features) if _covered(fitted, 1.0, slots) else None


def _seconds(fitted: FittedCost, features: Mapping[str, float]) -> float:
    coefficients = fitted.coefficients()
    return sum(coefficients[name] * value for name, value in features.items())


def _covered(fitted: FittedCost, rows: float, slots: float) -> bool:
    hull = fitted.source.hull
    ends = ((rows, hull.get("rows")), (slots, hull.get("kv_read_tokens")))
    return all(end is None or value <= end[1] for value, end in ends)


def _source(
    shapes: KernelShapes,
    fitted: CostSource,
    grids: tuple[grid.Grid, grid.Grid | None],
    extras: tuple[EngineOverhead, EngineOverhead | None],
) -> CostSource:
    hull = GridHull(fitted.hull)
    hull.decode, hull.prefill = grids
    errors = grid.shape_errors("decode", shapes.decode, ("rows", "KV slots a row"))
    if hull.prefill is not None:
        errors |= grid.shape_errors("prefill", shapes.prefill, ("tokens", "KV slots"))
    return replace(
        fitted,
        kind="table",
        provenance={**fitted.provenance, "grid": _provenance(shapes, extras)},
        heldout={**fitted.heldout, **errors},
        hull=hull,
    )


def _provenance(shapes: KernelShapes, extras: tuple[EngineOverhead, EngineOverhead | None]) -> dict[str, Any]:
    made_on, here = shapes.run.made_on, kernel_digest()
    decode, prefill = extras
    stale = "" if made_on.kernels == here else f", and this tree's are {here}: time them again"
    return {
        "from": "bench kernels",
        "table": shapes.run.digest,
        "geometry": str(shapes.geometry),
        "date": made_on.date,
        "torch": made_on.torch,
        "triton": made_on.triton,
        "kernel sources": made_on.kernels + stale,
        "block size": shapes.block_size,
        "decode shapes": len(shapes.decode),
        "around a decode": _words(decode, "row"),
        "prefill shapes": len(shapes.prefill) if prefill else "too few for a grid: chunks are fitted",
        "around a chunk": _words(prefill, "token") if prefill else None,
    }


def _words(extra: EngineOverhead, unit: str) -> str:
    return f"{1e6 * extra.step_s:.3g} µs a step, {1e6 * extra.each_s:.3g} µs a {unit}, all layers"
