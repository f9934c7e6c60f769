"""What timed kernels say about the goals: the worst case of each, because one bad shape is what an engine waits for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from harness.bench.gpu.goals.crossover import wrong_decisions
from harness.bench.gpu.goals.goal import Found, missing
from harness.bench.gpu.goals.listed import (
    DTYPE,
    GAIN_ROWS,
    GAIN_SHARED,
    GROUPS,
    LARGE_BYTES,
    LONG_QUERIES,
    PAGED_BLOCKS,
)
from harness.bench.gpu.goals.rows import TimedCase
from harness.bench.kernels.names import CASCADE, CONTIGUOUS, OURS, SDPA

FLASHINFER, FLEX = "flashinfer", "flex"
NO_CASE = "no such case was timed"
Figure = Callable[[TimedCase], float | None]


def kernel_findings(cases: Sequence[TimedCase]) -> dict[str, Found]:
    """By goal: what was found."""
    large = [case for case in cases if case.decode and _large(case)]
    prefill = [case for case in cases if case.ours["queries"] >= LONG_QUERIES]
    shared = [case for case in cases if case.ours["shared_prefix"] and case.ours["queries"] == 1]
    theirs = [case for case in cases if not case.ours["shared_prefix"]]
    return {
        "decode_copy": _worst(large, lambda case: float(case.ours["copy_share"]), min),
        "paging": _worst(large, lambda case: case.over(CONTIGUOUS), max),
        "blocks": _block_curve(cases),
        "flashinfer_worst": _worst(theirs, lambda case: case.over(FLASHINFER), max),
        "flashinfer_median": _median(theirs, FLASHINFER),
        "flex_median": _median(theirs, FLEX),
        "sdpa_median": _median([case for case in theirs if case.decode], SDPA),
        "prefill_ceiling": _worst(prefill, lambda case: float(case.ours["matmul_share"]), min),
        "prefill_sdpa": _worst(prefill, _their_time_over_ours(SDPA), min),
        "cascade_flat": _worst(shared, _cascade_over_flat, max),
        "cascade_gain": _gain(shared),
        "cascade_rule": wrong_decisions(shared),
    }


def _large(case: TimedCase) -> bool:
    """Whether a claim about bandwidth and paging is about the case."""
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


def _their_time_over_ours(provider: str) -> Figure:
    def figure(case: TimedCase) -> float | None:
        over = case.over(provider)
        return None if over is None else 1 / over

    return figure


def _cascade_over_flat(case: TimedCase) -> float | None:
    return case.us[CASCADE] / case.us[OURS] if CASCADE in case.us else None


def _gain(shared: Iterable[TimedCase]) -> Found:
    """Of several cases of that size (head counts) the smallest gain."""
    wanted = [
        case
        for case in shared
        if (case.ours["batch"], case.ours["shared_prefix"]) == (GAIN_ROWS, GAIN_SHARED)
    ]
    return _worst(wanted, lambda case: case.us[OURS] / case.us[CASCADE] if CASCADE in case.us else None, min)


def _block_curve(cases: Iterable[TimedCase]) -> Found:
    """Of the provider that finds blocks the same way at every size: slowest over fastest at the same shape."""
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
