"""A run of `bench policy`: the lines of its table, with our goal and vLLM's figure for each.

The figures of vLLM are of its own Python core, version 0.33.0, unmodified, block size 16, on a shared x86 machine, per
CPU-second, the median of five. The beam figure is from vLLM v0, the newest that forked beams in its block manager.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bench.policy.work import YARDSTICK
from harness.bench.session import Timing, run_session
from harness.config.errors import UserError
from harness.console import say

TIMINGS = Path(__file__).parent / "benchmarks.py"
CLOCK = "time.process_time"
SIZES = {
    "sequences": 256,
    "tokens": 2048,
    "prompts": 256,
    "running": 256,
    "steps": 400,
    "beam_steps": 256,
}
"""The amount of work in one round. Tests use less."""
SMALLEST = 256
"""The smallest number of blocks or requests for a meaningful curve."""


@dataclass(frozen=True)
class Line:
    """One line of the table: `least` is our goal, `vllm` the published figure, both in `unit` per CPU-second."""

    key: str
    work: str
    unit: str
    least: float | None
    vllm: float | None
    definition: str


LINES = (
    Line(
        "allocate",
        "allocate + free 256 x 2048 tokens",
        "blocks/s",
        3.5e6,
        0.72e6,
        "Block 16, caching on, names (SHA-256) computed beforehand and new in every round, so that nothing hits. "
        "Per prompt: does it fit, admit, take and name its 128 blocks; then all are released. Nothing is evicted: "
        "the pool is twice as large, and its index has grown to its size before.",
    ),
    Line(
        "allocate_evicting",
        "  where every block evicts one",
        "blocks/s",
        None,
        None,
        "The same in a pool of exactly 256 x 128 blocks, all cached by the round before: each block taken evicts one.",
    ),
    Line(
        "prompt",
        "2048-token prompt, half shared",
        "prompts/s",
        1e4,
        2.0e3,
        "From a prompt as int64 array to its release: range check, SHA-256 of all 128 blocks, lookup (64 hit), "
        "fit, admit, take and name the rest, release. Nothing is evicted.",
    ),
    Line(
        "prompt_evicting",
        "  where every new block evicts one",
        "prompts/s",
        None,
        None,
        "The same in a full pool of 200 x 128 blocks.",
    ),
    Line(
        "prompt_list",
        "  from a Python list of tokens",
        "prompts/s",
        None,
        None,
        "The same as the first, and the list is converted to an array.",
    ),
    Line(
        "decode",
        "decode, 256 running, manager only",
        "steps/s",
        8e3,
        587.0,
        "Calendar and block manager: who needs a block, does it fit, take and name, count the tokens; caching on, "
        "outputs private as in replay. Prompts of 100 ... 115 tokens: 16 sequences need a block in every step.",
    ),
    Line(
        "decode_hashed",
        "  outputs hashed",
        "steps/s",
        None,
        587.0,
        "The same with outputs that later requests can hit: the 16 tokens of every block that fills are told and "
        "hashed (SHA-256).",
    ),
    Line(
        "schedule",
        "schedule + commit, 256 running",
        "steps/s",
        4e3,
        272.0,
        "Scheduler over the manager, caching on, every request decoding; the plan's rows are left as arrays.",
    ),
    Line(
        "schedule_rows",
        "  every row laid out",
        "steps/s",
        None,
        272.0,
        "The same, and all 256 rows of the plan are made into objects.",
    ),
    Line(
        "beams",
        "beam churn, k = 4, prompt 512",
        "beam-tokens/s",
        1e5,
        12.7e3,
        "Per step: do four rows fit, extend each (a block, or a copy of a shared tail), collect copies and frees, "
        "re-parent by four random parents. 256 steps after the prompt was forked.",
    ),
)


def rates(timings: Sequence[Timing]) -> dict[str, float]:
    """Units of work per CPU-second by line, from the medians."""
    return {one.extra["line"]: one.extra["count"] / one.median_s for one in timings}


def records(rate: Mapping[str, float]) -> list[dict[str, Any]]:
    """Every line with its definition, for the JSON file."""
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


def bench(flags: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit code."""
    if flags.rounds < 1:
        raise UserError(f"bench policy: --rounds is {flags.rounds}, must be at least 1")
    if flags.curve and min(*flags.blocks, *flags.queued) < SMALLEST:
        raise UserError(f"bench policy --curve: --blocks and --queued must be at least {SMALLEST}")
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    timings = run_session(
        [TIMINGS], {**SIZES, "rounds": flags.rounds}, out / "policy.samples.json", timer=CLOCK
    )
    rate = rates(timings)
    for line in table_lines(rate):
        say(line)
    (out / "policy.json").write_text(json.dumps(records(rate), indent=1) + "\n", encoding="utf-8")
    code = 0
    if flags.curve:
        from harness.bench.policy.curve import bench_curve

        code = bench_curve(flags.blocks, flags.queued, out)
    say(f"written to {out}")
    return code
