"""One run of `bench policy`: time the lines, and with `--curve` the cost of each operation by size, and memory."""

import argparse
import json
from pathlib import Path

from harness.bench.policy.table import rates, records, table_lines
from harness.bench.session import run_session
from harness.cli.say import say
from harness.config.errors import UserError

TIMINGS = Path(__file__).parent / "timings.py"
CLOCK = "time.process_time"
SIZES = {
    "sequences": 256,
    "tokens": 2048,
    "prompts": 256,
    "running": 256,
    "steps": 400,
    "beam_steps": 256,
}
"""How much work a round is; tests take less."""
SMALLEST = 256
"""Blocks or requests from which a curve makes sense."""


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
