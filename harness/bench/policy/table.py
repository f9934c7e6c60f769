"""The table of `bench policy`: what was reached, the least that we aim at, and vLLM's figure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.bench.policy.lines import LINES, YARDSTICK, Line
from harness.bench.session import Timing


def rates(timings: Sequence[Timing]) -> dict[str, float]:
    """Units of work a CPU-second by line, from the medians."""
    return {one.extra["line"]: one.extra["count"] / one.median_s for one in timings}


def records(rate: Mapping[str, float]) -> list[dict[str, Any]]:
    """Every line with its definition, for whoever reads the JSON."""
    return [
        {
            "line": line.key,
            "work": line.work.strip(),
            "unit": line.unit,
            "rate": rate[line.key],
            "least": line.least,
            "vllm": line.vllm,
            "per_yardstick": rate[line.key] / rate[YARDSTICK],
            "definition": line.definition,
        }
        for line in LINES
    ]


def table_lines(rate: Mapping[str, float]) -> Iterator[str]:
    """The table as text."""
    yield f"{'per CPU-second on one core':<37} {'ours':>9} {'at least':>9} {'':<6} {'vLLM 0.33':>9} {'ratio':>6}"
    for line in LINES:
        yield _line(line, rate[line.key])
    yield f"yardstick: {_short(rate[YARDSTICK])} turns of a plain Python loop a CPU-second"


def _line(line: Line, rate: float) -> str:
    state = "" if line.least is None else ("met" if rate >= line.least else "missed")
    ratio = "" if line.vllm is None else f"{rate / line.vllm:.1f}x"
    return (
        f"{line.work:<37} {_short(rate):>9} {_short(line.least):>9} {state:<6} {_short(line.vllm):>9} {ratio:>6}  "
        f"{line.unit}"
    )


def _short(figure: float | None) -> str:
    if figure is None:
        return ""
    if figure >= 1e6:
        return f"{figure / 1e6:.2f} M"
    return f"{figure / 1e3:.1f} k" if figure >= 1e3 else f"{figure:.0f}"
