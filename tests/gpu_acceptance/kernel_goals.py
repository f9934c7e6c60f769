"""The goals for timed kernels. The worst case counts, because an engine waits for its slowest call.

This module also finds from how many shared tokens a cascade is faster, whether the cost rule predicts it, and which
constants would. The rule (`paged_kernels.cascade_groups`): a cascade saves `(rows - tiles) x bytes of the shared KV /
speed` and costs `overhead`. Both are linear in `1 / speed` and `overhead`, so bounded least squares on the measured
savings gives the constants. Each case is weighted by the reciprocal of its flat time.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from gpu_acceptance.goals import (
    DTYPE,
    GAIN_ROWS,
    GAIN_SHARED,
    GROUPS,
    LARGE_BYTES,
    LONG_QUERIES,
    PAGED_BLOCKS,
    PUBLIC_DECODE,
    PUBLIC_PREFILL,
    RATES,
    Found,
    missing,
)
from harness.bench.cases import KernelCase
from harness.console import remark
from harness.cost.timings import ALWAYS, CASCADE, CONTIGUOUS, OURS, SDPA, TABLE, KernelRunError, read_run
from harness.kernel_speed.block_sizes import decode_case, decode_time, kernel_of, newest_baseline
from harness.kernel_speed.gpus import GPUS

if TYPE_CHECKING:
    from paged_kernels.cascade_groups import CascadeCost


Row = Mapping[str, Any]
NOISE = 1.02
"""A choice that is slower than the other by a smaller factor is no mistake."""
FEWEST = 6  # cases, to fit three constants
FLASHINFER, FLEX, HOPPER = "flashinfer", "flex", "paged-hopper"
NO_CASE = "no such case was timed"


@dataclass(frozen=True)
class TimedCase:
    """One case of one run: our row, and the median time of every provider in µs."""

    run: str
    ours: Row
    us: Mapping[str, float]

    @property
    def name(self) -> str:
        """The case's stable name."""
        return str(self.ours["name"])

    @property
    def decode(self) -> bool:
        """Whether each sequence has one query and no prefix is shared."""
        return self.ours["queries"] == 1 and not self.ours["shared_prefix"]

    def over(self, provider: str) -> float | None:
        """Our time divided by the provider's; None where the provider did not serve the case."""
        return self.us[OURS] / self.us[provider] if provider in self.us else None


def timed_cases(out: Path) -> list[TimedCase]:
    """The cases of every `bench kernels` folder directly below `out`. Cases that we did not serve are left out.

    A table that cannot be read, or that is empty because its time was over, is reported and left out.
    """
    files = sorted(out.glob(f"*/{TABLE}"))
    return [case for file in files for case in cases_of(file.parent.name, _rows(file))]


def _rows(file: Path) -> Sequence[Row]:
    try:
        return read_run(file).rows
    except KernelRunError as error:
        remark(str(error))
        return ()


def cases_of(run: str, rows: Sequence[Row]) -> Iterator[TimedCase]:
    """The cases of one run's rows."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(str(row["name"]), {})[str(row["provider"])] = float(row["median_us"])
    for row in rows:
        if row["provider"] == OURS:
            yield TimedCase(run, row, times[str(row["name"])])


@dataclass(frozen=True)
class Sharing:
    """A measured case: the inputs of the cost rule, and the seconds without (flat) and with a cascade."""

    name: str
    rows: int
    kv_bytes: int
    tiles: int
    flat_s: float
    cascade_s: float


def wrong_decisions(shared: Iterable[TimedCase]) -> Found:
    """The number of cases in which the rule chose the slower way, by more than noise."""
    judged = [case for case in shared if {OURS, CASCADE, ALWAYS} <= case.us.keys()]
    if not judged:
        return missing("no case was timed flat, as the rule says, and as a cascade in any case")
    wrong = [case.name for case in judged if case.us[CASCADE] > NOISE * min(case.us[OURS], case.us[ALWAYS])]
    return Found(len(wrong), f"of {len(judged)}{': ' if wrong else ''}{', '.join(wrong[:4])}")


def crossovers(shared: Iterable[TimedCase]) -> dict[int, int | None]:
    """For each number of sequences, the shared tokens from which a cascade was always faster; None where it was not."""
    faster: dict[int, dict[int, bool]] = {}
    for case in shared:
        if ALWAYS in case.us:
            lengths = faster.setdefault(int(case.ours["batch"]), {})
            won = case.us[ALWAYS] < case.us[OURS]
            lengths[int(case.ours["shared_prefix"])] = won and lengths.get(
                int(case.ours["shared_prefix"]), True
            )
    return {rows: _from_where(lengths) for rows, lengths in sorted(faster.items())}


def _from_where(faster: Mapping[int, bool]) -> int | None:
    start = None
    for length in sorted(faster, reverse=True):
        if not faster[length]:
            break
        start = length
    return start


def sharings(shared: Iterable[TimedCase]) -> list[Sharing]:
    """The cases that were timed both flat and as a cascade."""
    return [_sharing(case) for case in shared if ALWAYS in case.us]


def _sharing(case: TimedCase) -> Sharing:
    import torch

    from paged_kernels.cascade_groups import rows_per_tile

    row = case.ours
    spec = KernelCase(**{name: row[name] for name in KernelCase.__dataclass_fields__})
    token_bytes = 2 * spec.kv_heads * spec.head_dim * spec.element_bytes
    tiles = -(-spec.batch // rows_per_tile(spec.heads // spec.kv_heads, torch.device("cuda")))
    seconds = (case.us[OURS] / 1e6, case.us[ALWAYS] / 1e6)
    return Sharing(case.name, spec.batch, spec.shared_prefix * token_bytes, tiles, *seconds)


def fitted_cost(cases: Sequence[Sharing], cache_bytes: int) -> "CascadeCost | None":
    """The constants that fit the savings best; None where too few cases lie on either side of the cache size."""
    import numpy as np
    from scipy.optimize import lsq_linear

    from paged_kernels.cascade_groups import CascadeCost

    cached = np.array([case.kv_bytes <= cache_bytes / 2 for case in cases])
    if len(cases) < FEWEST or cached.all() or not cached.any():
        return None
    saved = np.array([(case.rows - case.tiles) * case.kv_bytes for case in cases], dtype=np.float64)
    weight = 1 / np.array([case.flat_s for case in cases])
    columns = np.stack(
        [np.where(cached, 0, saved) / 1e12, np.where(cached, saved, 0) / 1e12, -np.full(len(cases), 1e-6)]
    )
    gain = np.array([case.flat_s - case.cascade_s for case in cases])
    found = lsq_linear((columns * weight).T, gain * weight, bounds=(1e-3, np.inf)).x
    return CascadeCost(1e12 / found[0], 1e12 / found[1], cache_bytes, found[2] * 1e-6)


def mistakes(cases: Sequence[Sharing], cost: "CascadeCost") -> list[str]:
    """The cases in which a rule with these constants chooses the slower way, by more than noise."""
    return [case.name for case in cases if _chosen_s(case, cost) > NOISE * min(case.flat_s, case.cascade_s)]


def _chosen_s(case: Sharing, cost: "CascadeCost") -> float:
    from paged_kernels.cascade_groups import RowGroup

    saved = cost.saved_s(RowGroup(case.rows, case.kv_bytes, case.tiles)) - cost.overhead_s
    return case.cascade_s if saved > 0 else case.flat_s


def proposal(shared: Sequence[TimedCase], cache_bytes: int) -> dict[str, Any] | None:
    """Proposed constants of `paged_kernels/cascade_groups.py`; None where no case was timed both ways.

    Nothing applies the proposal. A person who has looked at it changes the constants in the code.
    """
    from dataclasses import asdict

    from paged_kernels.cascade_groups import H200

    cases = sharings(shared)
    if not cases:
        return None
    fitted = fitted_cost(cases, cache_bytes)
    return {
        "what": "constants of CascadeCost fitted to measured savings; a proposal, which nothing applies",
        "cases": len(cases),
        "crossover_tokens_by_sequences": crossovers(shared),
        "today": {"constants": asdict(H200), "mistakes": mistakes(cases, H200)},
        "proposed": {"constants": asdict(fitted), "mistakes": mistakes(cases, fitted)} if fitted else None,
    }


Figure = Callable[[TimedCase], float | None]


def kernel_findings(cases: Sequence[TimedCase]) -> dict[str, Found]:
    """The findings by goal."""
    large = [case for case in cases if case.decode and _large(case)]
    prefill = [case for case in cases if case.ours["queries"] >= LONG_QUERIES]
    shared = [case for case in cases if case.ours["shared_prefix"] and case.ours["queries"] == 1]
    theirs = [case for case in cases if not case.ours["shared_prefix"]]
    return {
        "decode_copy": _worst(large, lambda case: float(case.ours["copy_share"]), min),
        "decode_public": _worst(cases, _over_public_decode, min),
        "decode_model": _worst(cases, _over_model, min),
        "prefill_public": _worst(cases, _over_public_prefill, min),
        "paging": _worst(large, lambda case: case.over(CONTIGUOUS), max),
        "blocks": _block_curve(cases),
        "flashinfer_worst": _worst(theirs, lambda case: case.over(FLASHINFER), max),
        "flashinfer_median": _median(theirs, FLASHINFER),
        "flex_median": _median(theirs, FLEX),
        "sdpa_median": _median([case for case in theirs if case.decode], SDPA),
        "prefill_ceiling": _worst(prefill, lambda case: float(case.ours["matmul_share"]), min),
        "prefill_sdpa": _worst(prefill, _their_time_over_ours(SDPA), min),
        "prefill_hopper": _worst(prefill, _their_time_over_ours(HOPPER), max),
        "cascade_flat": _worst(shared, _cascade_over_flat, max),
        "cascade_gain": _gain(shared),
        "cascade_rule": wrong_decisions(shared),
    }


def _large(case: TimedCase) -> bool:
    """Whether the case counts for bandwidth and paging."""
    row = case.ours
    claimed = row["dtype"] == DTYPE and row["heads"] // row["kv_heads"] in GROUPS
    return bool(claimed and row["flat_bytes"] >= LARGE_BYTES and row["block_size"] >= PAGED_BLOCKS)


def _figures(cases: Iterable[TimedCase], figure: Figure) -> dict[str, float]:
    found = ((f"{case.name} ({case.run})", figure(case)) for case in cases)
    return {name: value for name, value in found if value is not None}


def _worst(cases: Iterable[TimedCase], figure: Figure, worst: Callable[[Iterable[float]], float]) -> Found:
    figures = _figures(cases, figure)
    if not figures:
        return missing(NO_CASE)
    value = worst(figures.values())
    name = next(name for name, found in figures.items() if found == value)
    return Found(value, f"{name}, of {len(figures)}")


def _median(cases: Iterable[TimedCase], provider: str) -> Found:
    figures = _figures(cases, lambda case: case.over(provider))
    return Found(median(figures.values()), f"{len(figures)} cases") if figures else missing(NO_CASE)


def _published_shape(case: TimedCase) -> bool:
    """Whether the case has the heads and type of the published tables, equal lengths, and no shared prefix."""
    row = case.ours
    same = (row["heads"], row["kv_heads"], row["head_dim"], row["dtype"]) == (32, 8, 128, DTYPE)
    return same and not row["ragged"] and not row["shared_prefix"]


def _device_word(case: TimedCase) -> str | None:
    """The device by whose name `RATES` and the published shares are found; None for any other."""
    from harness.twin.configured import preset_of_device

    preset = preset_of_device(str(case.ours.get("device", "")))  # an H100 PCIe has other rates
    return next((word for word in RATES if word.lower() == preset), None)


def _over_public_decode(case: TimedCase) -> float | None:
    """Our share of the datasheet's bandwidth over the best published one at this shape."""
    word = _device_word(case)
    shape = (int(case.ours["batch"]), int(case.ours["context"]))
    if word is None or not case.decode or not _published_shape(case) or not _large(case):
        return None
    theirs = PUBLIC_DECODE[word].get(shape)
    return None if theirs is None else _bandwidth(case) / RATES[word][0] / theirs


def _over_public_prefill(case: TimedCase) -> float | None:
    """Our share of the datasheet's FLOP/s over the best published one, for whole prompts."""
    row, word = case.ours, _device_word(case)
    if word is None or not _published_shape(case) or row["queries"] != row["context"]:
        return None
    theirs = PUBLIC_PREFILL[word].get((int(row["batch"]), int(row["context"])))
    flops = 2.0 * row["heads"] * row["head_dim"] * row["context"] ** 2 * row["batch"]  # causal
    return None if theirs is None else flops / (case.us[OURS] * 1e-6) / RATES[word][1] / theirs


def _over_model(case: TimedCase) -> float | None:
    """The static model's time over ours, from the accepted figures of the compiled kernel; None where it has none."""
    word = _device_word(case)
    if word is None or not case.decode or not _published_shape(case) or not _large(case):
        return None
    gpu = GPUS[word.lower()]
    kernel = decode_case(_accepted_kernels(), 2, int(case.ours["block_size"]), gpu.capability)
    if kernel is None:
        return None
    time = decode_time(kernel_of(kernel), gpu, int(case.ours["batch"]), int(case.ours["context"]), 2)
    return time.seconds / (case.us[OURS] * 1e-6)


@cache
def _accepted_kernels() -> Mapping[str, Any]:
    """The resource gate's accepted figures of this checkout, by case."""
    root = Path(__file__).resolve().parents[2]
    content = newest_baseline(root / "results" / "baselines").read_text(encoding="utf-8")
    return cast(Mapping[str, Any], json.loads(content)["cases"])


def _bandwidth(case: TimedCase) -> float:
    return float(case.ours["flat_bytes"]) / (case.us[OURS] * 1e-6)


def _their_time_over_ours(provider: str) -> Figure:
    def figure(case: TimedCase) -> float | None:
        over = case.over(provider)
        return None if over is None else 1 / over

    return figure


def _cascade_over_flat(case: TimedCase) -> float | None:
    return case.us[CASCADE] / case.us[OURS] if CASCADE in case.us else None


def _gain(shared: Iterable[TimedCase]) -> Found:
    """The smallest gain of all cases with that many rows and shared tokens (they differ in head counts)."""
    wanted = [
        case
        for case in shared
        if (case.ours["batch"], case.ours["shared_prefix"]) == (GAIN_ROWS, GAIN_SHARED)
    ]
    return _worst(wanted, lambda case: case.us[OURS] / case.us[CASCADE] if CASCADE in case.us else None, min)


def _block_curve(cases: Iterable[TimedCase]) -> Found:
    """Slowest over fastest time at the same shape, of the provider that reads block ids the same way at every size."""
    shapes: dict[tuple[int, int], dict[int, float]] = {}
    for case in cases:
        vector = next((name for name in case.us if ":" in name), None)
        if vector and case.ours["block_size"] >= PAGED_BLOCKS:
            shape = (case.ours["batch"], case.ours["context"])
            shapes.setdefault(shape, {})[case.ours["block_size"]] = case.us[vector]
    curves = {shape: sizes for shape, sizes in shapes.items() if len(sizes) > 1}
    if not curves:
        return missing(NO_CASE)
    shape = max(curves, key=lambda one: _range(curves[one]))
    points = ", ".join(f"{size}: {us:.1f} µs" for size, us in sorted(curves[shape].items()))
    return Found(_range(curves[shape]), f"batch {shape[0]}, context {shape[1]}: {points}")


def _range(sizes: Mapping[int, float]) -> float:
    return max(sizes.values()) / min(sizes.values())
