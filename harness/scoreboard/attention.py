"""Decode attention from published tables: how well interpolation and the physical form predict what they have not seen.

Tables: `generation_attention_perf.parquet` of the installed package, vLLM's kernels, bfloat16, 32 query heads and 8 KV
heads of 128, no window. They are read there and not copied.

A table times the same KV again and again. Where it fits the L2 cache it is read from there, which the plain form
`a0 + a1 rows + bytes / (eta bandwidth)` does not know; the form with the cache has a second rate for such bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from harness.cost.fitted import held_out_error
from harness.metrics.log import FloatArray
from harness.scoreboard.published_runs import package_folder

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_SLOT_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # K and V, bfloat16


@dataclass(frozen=True)
class Gpu:
    """A system of the package: version of vLLM, bandwidth in bytes/s and L2 cache in bytes, both of the datasheet.

    L2: NVIDIA's white papers on A100, H100, Ada, RTX Blackwell and Blackwell.
    """

    system: str
    version: str
    bandwidth: float
    cache: float


GPUS = (
    Gpu("a100_sxm", "0.14.0", 2039e9, 40e6),
    Gpu("h100_sxm", "0.24.0", 3350e9, 50e6),
    Gpu("h200_sxm", "0.24.0", 4800e9, 50e6),
    Gpu("l40s", "0.24.0", 864e9, 96e6),
    Gpu("rtx_pro_6000_server", "0.24.0", 1597e9, 128e6),
    Gpu("b200_sxm", "0.24.0", 8000e9, 126e6),
)
TRANSFERS = (
    (("a100_sxm", "h100_sxm"), "h200_sxm"),
    (("h100_sxm",), "h200_sxm"),
    (("h200_sxm",), "h100_sxm"),
    (("a100_sxm", "h200_sxm"), "h100_sxm"),
    (("h100_sxm", "h200_sxm"), "a100_sxm"),
    (("a100_sxm", "h100_sxm", "h200_sxm"), "l40s"),
    (("a100_sxm", "h100_sxm", "h200_sxm", "l40s"), "rtx_pro_6000_server"),
    (("h100_sxm", "h200_sxm"), "b200_sxm"),
)


@dataclass(frozen=True)
class Timings:
    """Decode attention of one layer: rows, KV slots a row, microseconds, float64 `[timings]`."""

    gpu: Gpu
    rows: FloatArray
    slots: FloatArray
    us: FloatArray

    def take(self, chosen: npt.NDArray[np.bool_]) -> "Timings":
        """The timings that are chosen."""
        return Timings(self.gpu, self.rows[chosen], self.slots[chosen], self.us[chosen])


def read_timings(gpu: Gpu) -> Timings:
    """The timings of a GPU; those of one shape take their median."""
    import pandas as pd

    folder = package_folder() / "systems" / "data" / gpu.system / "attention" / "vllm" / gpu.version
    table = pd.read_parquet(Path(folder) / "generation_attention_perf.parquet")
    chosen = (
        (table["num_heads"] == HEADS)
        & (table["num_key_value_heads"] == KV_HEADS)
        & (table["head_dim"] == HEAD_DIM)
        & (table["kv_cache_dtype"] == "bfloat16")
    )
    if "window_size" in table:
        chosen &= table["window_size"] == 0
    found = table[chosen].groupby(["batch_size", "step"], as_index=False)["latency"].median()
    numbers = {name: found[name].to_numpy(dtype=np.float64) for name in ("batch_size", "step", "latency")}
    return Timings(gpu, numbers["batch_size"], numbers["step"] + 1.0, numbers["latency"] * 1e3)


Form = Callable[[FloatArray, Timings], FloatArray]


def plain_form(constants: FloatArray, timings: Timings) -> FloatArray:
    """a0 + a1 rows + bytes / (eta bandwidth), in us; constants (a0, a1, eta)."""
    read = timings.rows * timings.slots * _SLOT_BYTES / timings.gpu.bandwidth * 1e6
    us: FloatArray = constants[0] + constants[1] * timings.rows + read / constants[2]
    return us


def cached_form(constants: FloatArray, timings: Timings) -> FloatArray:
    """The same, where bytes up to a share of the cache come from it, and from there to a multiple ever fewer.

    Constants (a0, a1, eta, rate of the cache as a multiple of the bandwidth, share, multiple).
    """
    size = timings.rows * timings.slots * _SLOT_BYTES
    read = size / timings.gpu.bandwidth * 1e6
    end = constants[4] * constants[5]
    cached = np.clip((end - size / timings.gpu.cache) / (end - constants[4]), 0.0, 1.0)
    rate = (1.0 - cached) / constants[2] + cached / constants[3]
    us: FloatArray = constants[0] + constants[1] * timings.rows + read * rate
    return us


_PLAIN = ([10.0, 0.2, 0.9], [0.0, 0.0, 0.3], [50.0, 2.0, 1.2])
_CACHED = ([10.0, 0.2, 0.9, 2.0, 0.8, 2.0], [0.0, 0.0, 0.3, 0.9, 0.3, 1.2], [50.0, 2.0, 1.1, 6.0, 2.0, 4.0])
FORMS: Mapping[str, tuple[Form, tuple[list[float], list[float], list[float]]]] = {
    "plain form": (plain_form, _PLAIN),
    "form with cache": (cached_form, _CACHED),
}


def fitted(form: str, tables: Sequence[Timings]) -> FloatArray:
    """The constants that make relative errors small, in which few large errors count little."""
    price, (start, low, high) = FORMS[form]

    def errors(constants: FloatArray) -> FloatArray:
        return np.concatenate([price(constants, table) / table.us - 1.0 for table in tables])

    found = least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.05)
    return np.asarray(found.x, dtype=np.float64)


def transfer_error(form: str, known: Sequence[Timings], other: Timings) -> dict[str, float]:
    """The error on a GPU that the fit has not seen."""
    return held_out_error(FORMS[form][0](fitted(form, known), other), other.us)


def held_out(timings: Timings, axis: str, form: str | None) -> dict[str, float]:
    """Every other inner value of an axis is left out whole and predicted from the rest, then the others.

    Between kept neighbours, which lie four-fold apart, the time is interpolated on logarithms; with a form, the ratio
    of the time to the form, which is fitted to the kept values alone.
    """
    values = timings.rows if axis == "rows" else timings.slots
    other = timings.slots if axis == "rows" else timings.rows
    inner = np.unique(values)[1:-1]
    predicted: list[float] = []
    measured: list[float] = []
    for gone in (inner[0::2], inner[1::2]):
        left = np.isin(values, gone)
        scale = np.ones_like(timings.us)
        if form:
            scale = FORMS[form][0](fitted(form, [timings.take(~left)]), timings)
        for line in np.unique(other):
            kept, out = (other == line) & ~left, (other == line) & left
            order = np.argsort(values[kept])
            place, ratio = np.log(values[kept][order]), np.log((timings.us / scale)[kept][order])
            out &= (values >= np.exp(place[0]) if len(place) else False) & (
                values <= values[kept].max(initial=0)
            )
            if len(place) < 2 or not out.any():
                continue
            found = np.exp(np.interp(np.log(values[out]), place, ratio)) * scale[out]
            predicted += found.tolist()
            measured += timings.us[out].tolist()
    return held_out_error(np.array(predicted), np.array(measured))
