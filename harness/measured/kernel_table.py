"""The `table` model with attention from `bench kernels`: timed calls for its grid, a calibration for all else."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from harness.config.schema import RunConfig
from harness.gate.kernels import kernel_digest
from harness.measured.kernel_shapes import KernelShapes, kernel_shapes
from harness.point.shapes import model_shape, pool_shape
from harness.sim.cost import CostSource
from harness.sim.features import ATTENTION_FEATURES
from harness.sim.fitted import FittedCost
from harness.sim.hull import GridHull
from harness.sim.table import Grid, TableCost
from harness.sim.table_around import Around, around, with_around
from harness.sim.table_errors import shape_errors
from harness.sim.table_surface import at_block_size


def kernel_table(config: RunConfig, fitted: FittedCost) -> TableCost:
    """Attention of all layers from the timings that `cost.kernels` names; `fitted` outside of them and for the rest.

    A timed call is the kernel alone; what the engine adds around it is what the calibration saw beyond
    (`harness.sim.table_around`).

    Raises KernelTableError where the timings are not of the point's attention.
    """
    shapes, size = (
        kernel_shapes(config).of_layers(model_shape(config.model).layers),
        pool_shape(config).block_size,
    )
    extra = around(at_block_size(shapes.decode, size), partial(_decode_in_engine, fitted, size))
    decode, prefill = with_around(shapes.decode_grid(), extra), shapes.prefill_grid()
    more = None
    if prefill is not None:
        more = around(at_block_size(shapes.prefill, size), partial(_chunk_in_engine, fitted, size))
        prefill = with_around(prefill, more)
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
    grids: tuple[Grid, Grid | None],
    extras: tuple[Around, Around | None],
) -> CostSource:
    hull = GridHull(fitted.hull)
    hull.decode, hull.prefill = grids
    errors = shape_errors("decode", shapes.decode, ("rows", "KV slots a row"))
    if hull.prefill is not None:
        errors |= shape_errors("prefill", shapes.prefill, ("tokens", "KV slots"))
    return replace(
        fitted,
        kind="table",
        provenance={**fitted.provenance, "grid": _provenance(shapes, extras)},
        heldout={**fitted.heldout, **errors},
        hull=hull,
    )


def _provenance(shapes: KernelShapes, extras: tuple[Around, Around | None]) -> dict[str, Any]:
    made_on, here = shapes.run.made_on, kernel_digest()
    same = made_on.kernels == here
    decode, prefill = extras
    return {
        "from": "bench kernels",
        "table": shapes.run.digest,
        "geometry": str(shapes.geometry),
        "date": made_on.date,
        "torch": made_on.torch,
        "triton": made_on.triton,
        "kernel sources": made_on.kernels
        if same
        else f"{made_on.kernels}, and this tree's are {here}: time them again",
        "block size": shapes.block_size,
        "decode shapes": len(shapes.decode),
        "around a decode": _words(decode, "row"),
        "prefill shapes": len(shapes.prefill) if prefill else "too few for a grid: chunks are fitted",
        "around a chunk": _words(prefill, "token") if prefill else None,
    }


def _words(extra: Around, unit: str) -> str:
    return f"{1e6 * extra.step_s:.3g} µs a step, {1e6 * extra.each_s:.3g} µs a {unit}, all layers"
