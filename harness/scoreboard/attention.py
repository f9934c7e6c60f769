"""Decode attention from published tables: how well interpolation and physical forms predict what they have not seen.

Tables: `generation_attention_perf.parquet` of the installed package, vLLM's kernels, bfloat16, 32 query heads and 8 KV
heads of 128, no window. They are read there and not copied. Interpolation is that of `cost=operators`
(`harness.cost.decode_form`).
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from harness.cost.decode_form import AttentionMachine, Timings, decode_errors, fitted_form, form_us
from harness.cost.fitted import held_out_error
from harness.cost.grid import TimedShape, shape_errors
from harness.metrics.log import FloatArray
from harness.scoreboard.published_runs import checkpoint_of, package_folder

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_SLOT_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # K and V, bfloat16


@dataclass(frozen=True)
class Gpu:
    """A system of the package: version of vLLM, and the datasheet's GB/s, multiprocessors, L2 in MiB and boost GHz.

    NVIDIA's white papers on A100, H100, Ada, RTX Blackwell and Blackwell.
    """

    system: str
    version: str
    gbs: float
    multiprocessors: int
    l2_mib: float
    clock_ghz: float

    @property
    def machine(self) -> AttentionMachine:
        """The same for the form."""
        cache = self.l2_mib * 2**20
        return AttentionMachine(
            self.gbs * 1e9, _SLOT_BYTES, KV_HEADS, self.multiprocessors, cache, self.clock_ghz
        )


GPUS = (
    Gpu("a100_sxm", "0.14.0", 2039, 108, 40, 1.41),
    Gpu("h100_sxm", "0.24.0", 3350, 132, 50, 1.98),
    Gpu("h200_sxm", "0.24.0", 4800, 132, 50, 1.98),
    Gpu("l40s", "0.24.0", 864, 142, 96, 2.52),
    Gpu("rtx_pro_6000_server", "0.24.0", 1597, 188, 128, 2.617),
    Gpu("b200_sxm", "0.24.0", 8000, 148, 126, 1.965),
)
# FlashAttention 2 runs on A100, L40S and RTX PRO 6000, FlashAttention 3 on Hopper, and other kernels on B200.
SAME_KERNELS = (
    (("h100_sxm",), "h200_sxm"),
    (("h200_sxm",), "h100_sxm"),
    (("a100_sxm",), "l40s"),
    (("l40s",), "a100_sxm"),
    (("a100_sxm",), "rtx_pro_6000_server"),
    (("a100_sxm", "l40s"), "rtx_pro_6000_server"),
    (("a100_sxm", "rtx_pro_6000_server"), "l40s"),
    (("l40s", "rtx_pro_6000_server"), "a100_sxm"),
)
OTHER_KERNELS = (
    (("a100_sxm", "h100_sxm"), "h200_sxm"),
    (("a100_sxm", "h200_sxm"), "h100_sxm"),
    (("h100_sxm", "h200_sxm"), "a100_sxm"),
    (("a100_sxm", "h100_sxm", "h200_sxm"), "l40s"),
    (("a100_sxm", "h100_sxm", "h200_sxm", "l40s"), "rtx_pro_6000_server"),
    (("h100_sxm", "h200_sxm"), "b200_sxm"),
)


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
    return Timings(gpu.machine, numbers["batch_size"], numbers["step"] + 1.0, numbers["latency"] * 1e3)


def held_out(timings: Timings, *, by_ratio: bool) -> dict[str, dict[str, float]]:
    """Errors along rows and along slots: every other inner value is left out whole and predicted, then the others.

    By the ratio to the form, as `cost=operators` interpolates, or by logarithms of times.
    """
    shapes = [
        TimedShape(rows, slots, 64, us * 1e-6)
        for rows, slots, us in zip(timings.rows, timings.slots, timings.us, strict=True)
    ]
    names = ("rows", "KV slots a row")
    found = decode_errors(shapes, timings.machine) if by_ratio else shape_errors("decode", shapes, names)
    return {name: found[f"decode grid along {name}"] for name in names}


def package_errors(gpu: Gpu) -> dict[str, dict[str, float]]:
    """The same of the package's own interpolation, which `cost=published` uses: its table without the values left out.

    The package prices a model with these heads from a copy of its folder in which only that table differs.
    """
    import pandas as pd
    from aiconfigurator_core.sdk.engine import EngineHandle

    root = package_folder() / "systems"
    place = (
        Path("data") / gpu.system / "attention" / "vllm" / gpu.version / "generation_attention_perf.parquet"
    )
    table, known = pd.read_parquet(root / place), read_timings(gpu)
    checkpoint = checkpoint_of("Qwen/Qwen3-8B")
    whole = EngineHandle.compile(checkpoint, gpu.system, "vllm")
    columns = {"rows": (table["batch_size"], known.rows), "KV slots a row": (table["step"] + 1, known.slots)}
    found = {}
    for axis, (column, places) in columns.items():
        predicted, measured = [], []
        for parity in (0, 1):
            left_out = np.unique(column)[1:-1][parity::2]
            with TemporaryDirectory() as folder:
                shutil.copytree(root, Path(folder) / "systems", copy_function=os.symlink)
                file = Path(folder) / "systems" / place
                file.unlink()
                table[~column.isin(left_out)].to_parquet(file)
                part = EngineHandle.compile(checkpoint, gpu.system, "vllm", systems_path=f"{folder}/systems")
                for chosen in np.flatnonzero(np.isin(places, left_out)):
                    shape = int(known.rows[chosen]), max(int(known.slots[chosen]) - 1, 1), 2
                    predicted.append(_attention_ms(part, shape))
                    measured.append(_attention_ms(whole, shape))
        found[axis] = held_out_error(np.array(predicted), np.array(measured))
    return found


def _attention_ms(handle: Any, shape: tuple[int, int, int]) -> float:
    return float(sum(ms for name, ms, _, _ in handle.decode_step_per_op(*shape) if "attention" in name))


def plain_us(constants: FloatArray, timings: Timings) -> FloatArray:
    """a0 + a1 rows + bytes / (eta bandwidth), in us, the roofline's form; constants (a0, a1, eta)."""
    read = timings.rows * timings.slots * timings.machine.slot_bytes / timings.machine.bandwidth * 1e6
    us: FloatArray = constants[0] + constants[1] * timings.rows + read / constants[2]
    return us


def fitted_plain(tables: Sequence[Timings]) -> FloatArray:
    """The constants of the plain form that make relative errors small, in which few large errors count little."""

    def errors(constants: FloatArray) -> FloatArray:
        return np.concatenate([plain_us(constants, table) / table.us - 1.0 for table in tables])

    bounds = ([0.0, 0.0, 0.3], [50.0, 2.0, 1.2])
    found = least_squares(errors, [10.0, 0.2, 0.9], bounds=bounds, loss="soft_l1", f_scale=0.05)
    return np.asarray(found.x, dtype=np.float64)


def transfer_errors(known: Sequence[Timings], other: Timings) -> Mapping[str, dict[str, float]]:
    """The errors of the forms, fitted to other GPUs, on a GPU that they have not seen."""
    waves = form_us(fitted_form(known), other.machine, other.rows, other.slots)
    plain = plain_us(fitted_plain(known), other)
    return {
        "form with waves and cache": held_out_error(waves, other.us),
        "plain form": held_out_error(plain, other.us),
    }
