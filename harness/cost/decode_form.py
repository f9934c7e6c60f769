"""Decode attention of one layer: a form with few constants, and a grid of timed shapes interpolated by the ratio to it.

The form, in microseconds, for `rows` sequences with `slots` KV slots each:

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.cost.grid import DECODE_AXES, Grid, GridError, TimedShape, interpolated_grid, left_out_errors
from harness.metrics.log import FloatArray

START = (12.0, 1.0, 1.0, 3.0, 0.9, 20.0, 1.1, 0.05, 2.0)
LOW = (0.0, 0.0, 0.0, 0.1, 0.5, 5.0, 0.9, 0.02, 1.0)
HIGH = (50.0, 20.0, 20.0, 10.0, 1.1, 150.0, 1.27, 0.1, 8.0)
"""Of a0, a1, a2, w, eta, r in GB/s, size and width of the transition in L2 caches, p."""
_EACH, _SIZE = 5, 6
_STARTS = (15.0, 40.0)  # of r: between them the error has several minima
_ANY_SIZE = (0.05, 4.0)  # of a cache that is not known
_TILE = 128
_FEWEST = 2 * len(START)
"""With fewer shapes the form has too many constants, and logarithms of times are interpolated."""
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

    low, high = list(LOW), list(HIGH)
    if not all(one.machine.cache for one in tables):
        low[_SIZE], high[_SIZE] = _ANY_SIZE
    starts = ([*START[:_EACH], each, *START[_EACH + 1 :]] for each in _STARTS)
    fits = [
        least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.05) for start in starts
    ]
    return np.asarray(min(fits, key=lambda fit: fit.cost).x, dtype=np.float64)


def decode_grid(shapes: Sequence[TimedShape], machine: AttentionMachine) -> Grid:
    """The grid of timed decodes of one block size, by the ratio to the form; NaN outside of the timed shapes.

    Raises:
        GridError: there are too few shapes for a grid, or they lie on one line.
    """
    plain = interpolated_grid(shapes, shapes[0].block_size if shapes else 0)
    timed = _timings(shapes, machine)
    if len(timed.us) < _FEWEST:
        return plain
    from scipy.interpolate import RBFInterpolator

    form = fitted_form([timed])
    ratios = np.log(timed.us / form_us(form, machine, timed.rows, timed.slots))
    rows, slots = np.meshgrid(plain.across, plain.along, indexing="ij")
    between = RBFInterpolator(_places(timed.rows, timed.slots), ratios, kernel="linear", degree=1)
    ratio = between(_places(rows.ravel(), slots.ravel())).reshape(rows.shape)
    seconds = 1e-6 * form_us(form, machine, rows, slots) * np.exp(ratio)
    known = np.where(np.isnan(np.array(plain.seconds)), np.nan, seconds)
    return replace(plain, seconds=tuple(map(tuple, known.tolist())))


def decode_errors(shapes: Sequence[TimedShape], machine: AttentionMachine) -> dict[str, dict[str, float]]:
    """Errors of `decode_grid` on shapes that it has not seen, by axis: every other value, then the others."""

    def predict(kept: Sequence[TimedShape], out: Sequence[TimedShape]) -> list[float]:
        try:
            grid = decode_grid(kept, machine)
        except GridError:
            return [np.nan] * len(out)
        return [float(grid.at(shape.across, shape.along)) for shape in out]

    axes = {
        f"decode grid along {DECODE_AXES[0]}": lambda shape: shape.across,
        f"decode grid along {DECODE_AXES[1]}": lambda shape: shape.along,
    }
    return left_out_errors(shapes, axes, predict, lambda shape: shape.seconds)


def _timings(shapes: Sequence[TimedShape], machine: AttentionMachine) -> Timings:
    """The shapes, each once: those that were timed more than once take their median."""
    seen: dict[tuple[float, float], list[float]] = {}
    for shape in shapes:
        seen.setdefault((shape.across, shape.along), []).append(1e6 * shape.seconds)
    places = np.array(list(seen), dtype=np.float64).reshape(-1, 2)
    us = np.array([float(np.median(values)) for values in seen.values()])
    return Timings(machine, places[:, 0], places[:, 1], us)


def _places(rows: FloatArray, slots: FloatArray) -> FloatArray:
    """Coordinates in which the squared distance is that of log rows plus that of log slots plus that of their sum."""
    across, along = np.log2(rows), np.log2(slots)
    return np.stack([np.sqrt(2.0) * across + along / np.sqrt(2.0), np.sqrt(1.5) * along], axis=-1)
