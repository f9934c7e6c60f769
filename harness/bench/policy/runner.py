"""A run of `bench policy`: the lines of its table, with our goal and vLLM's figure for each.

The figures of vLLM are of its own Python core, version 0.33.0, unmodified, block size 16, on a shared x86 machine, per
CPU-second, the median of five. The beam figure is from vLLM v0, the newest that forked beams in its block manager.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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
    """One line of the table: `least` is our goal, `vllm` its recorded figure, both in `unit` per CPU-second.

    A line meets its goal with the rate `least`, or with `times` the rate of vLLM.
    """

    key: str
    work: str
    unit: str
    least: float | None
    vllm: float | None
    definition: str
    times: float | None = None


LIKE_FOR_LIKE = (
    Line(
        "allocate",
        "allocate + free 256 x 2048 tokens",
        "blocks/s",
        3.5e6,
        0.72e6,
        "Block 16, caching on, names (SHA-256) computed beforehand and new in every round, so that nothing hits. "
        "Per prompt: does it fit, admit, take and name its 128 blocks; then all are released. Nothing is evicted: "
        "the pool is twice as large, and its index has grown to its size before.",
        6,
    ),
    Line(
        "prompt_list",
        "2048-token prompt as list, half shared",
        "prompts/s",
        1e4,
        2.0e3,
        "From a prompt as a list of ints to its release: range check, SHA-256 of the blocks, lookup (64 hit), fit, "
        "admit, take and name the rest, release. Nothing is evicted. The half that all prompts share is looked up in "
        "a memory of hashed pieces, by all its bytes, and not hashed again.",
        5,
    ),
    Line(
        "decode_hashed",
        "decode, 256 running, outputs hashed",
        "steps/s",
        8e3,
        587.0,
        "Calendar and block manager: who needs a block, does it fit, take it, count the tokens. Later requests can "
        "hit the outputs: the 16 tokens of every block that fills are told as a list, hashed (SHA-256) and cached. "
        "Prompts of 100 ... 115 tokens: 16 sequences need a block in every step.",
        12,
    ),
    Line(
        "schedule_hashed",
        "schedule + commit, hashed, with rows",
        "steps/s",
        4e3,
        272.0,
        "Scheduler over the manager, caching on, every request decoding. In every step 16 requests have "
        "a block cached and are told the 16 tokens of a later one as a list, which are hashed; all 256 rows of the "
        "plan are made into objects.",
        18,
    ),
    Line(
        "beams",
        "beam churn, k = 4, prompt 512",
        "beam-tokens/s",
        1e5,
        12.7e3,
        "Per step: do four rows fit, extend each (a block, or a copy of a shared tail), collect copies and frees, "
        "re-parent by four random parents. 256 steps after the prompt was forked.",
        12,
    ),
)
"""The same work as vLLM's own classes do: outputs hashed, rows laid out, lists of ints in."""

LESS_WORK = (
    Line(
        "allocate_evicting",
        "allocate + free, every block evicts one",
        "blocks/s",
        None,
        None,
        "`allocate` in a pool of exactly 256 x 128 blocks, all cached by the round before: each block evicts one.",
    ),
    Line(
        "prompt",
        "prompt as array",
        "prompts/s",
        None,
        None,
        "`prompt_list`, from an int64 array.",
    ),
    Line(
        "prompt_evicting",
        "prompt as array, full pool",
        "prompts/s",
        None,
        None,
        "The same in a full pool of 200 x 128 blocks: every new block evicts one.",
    ),
    Line(
        "decode",
        "decode, outputs private",
        "steps/s",
        None,
        None,
        "`decode_hashed` without hashes: only their own request can find outputs, as in a replay.",
    ),
    Line(
        "schedule",
        "schedule + commit, private, no rows",
        "steps/s",
        None,
        None,
        "`schedule_hashed` with private outputs; the plan's rows are left as arrays.",
    ),
    Line(
        "schedule_rows",
        "schedule + commit, private, with rows",
        "steps/s",
        None,
        None,
        "The same, and all 256 rows of the plan are made into objects.",
    ),
)
"""Variants that do other work than vLLM's classes, so that no figure of vLLM stands beside them."""

LINES = (*LIKE_FOR_LIKE, *LESS_WORK)


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
            "times": line.times,
            "per_yardstick": rate[line.key] / rate[YARDSTICK],
            "definition": line.definition,
        }
        for line in LINES
    ]


def table_lines(rate: Mapping[str, float]) -> Iterator[str]:
    """The table as text."""
    width = max(len(line.work) for line in LINES)
    head = f"{'the same work as vLLM, per CPU-second':<{width}}"
    yield f"{head} {'ours':>9} {'at least':>9} {'':<6} {'vLLM 0.33':>9} {'ratio':>6}"
    for line in LIKE_FOR_LIKE:
        rate_here = rate[line.key]
        assert line.vllm
        assert line.least
        assert line.times
        state = "met" if rate_here >= min(line.least, line.times * line.vllm) else "missed"
        goal, vllm, ratio = _short(line.least), _short(line.vllm), f"{rate_here / line.vllm:.1f}x"
        yield f"{line.work:<{width}} {_short(rate_here):>9} {goal:>9} {state:<6} {vllm:>9} {ratio:>6}  {line.unit}"
    yield "other work"
    for line in LESS_WORK:
        yield f"{line.work:<{width}} {_short(rate[line.key]):>9} {'':>33}  {line.unit}"
    yield f"yardstick: {_short(rate[YARDSTICK])} turns of a plain Python loop a CPU-second"
    yield "vLLM's figures were taken on another day; a busy machine lowers ours alone. In one sitting: --against PYTHON"


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
    if flags.curve and flags.against is not None:
        raise UserError("bench policy: --curve measures ours alone; run it without --against")
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    if flags.against is not None:
        return _bench_against(flags.against, flags.rounds, out)
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


def _bench_against(python: str, rounds: int, out: Path) -> int:
    """Both sides in turns; returns 1 where a line meets neither its rate nor its ratio."""
    from harness.bench.policy.against import Paired, paired

    found: list[Paired] = []
    code = 0
    width = max(len(line.work) for line in LIKE_FOR_LIKE)
    for pair in paired(python, SIZES, rounds):
        if not found:
            head = f"{'the same work in turns, per CPU-second':<{width}} {'ours':>9} {'vLLM':>9} {'ratio':>6}"
            say(f"{head}  goal (vLLM {pair.version})")
        found.append(pair)
        line = next(one for one in LIKE_FOR_LIKE if one.key == pair.line)
        assert line.least
        assert line.times
        ratios = pair.ratios
        ratio = median(ratios)
        met = pair.rate >= line.least or ratio >= line.times
        code = code if met else 1
        goal = f"{_short(line.least)} or {line.times:g}x: {'met' if met else 'missed'}"
        spread = f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
        sides = f"{_short(pair.rate):>9} {_short(pair.vllm_rate):>9} {f'{ratio:.1f}x':>6}"
        say(f"{line.work:<{width}} {sides}  {goal} (rounds {spread}) {line.unit}")
    say("beams: vLLM 0.33 forks none in its block manager; its figure is of version 0, recorded.")
    (out / "against.json").write_text(
        json.dumps([one.record() for one in found], indent=1) + "\n", encoding="utf-8"
    )
    say(f"written to {out}")
    return code
