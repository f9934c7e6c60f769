"""The cost of each operation by size, whether it grows, and the memory of a million blocks."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.bench.policy.memory import LIMIT_MB, QUEUED, Footprint, footprint
from harness.bench.policy.operations import CONTROL, Cost, block_costs, queue_costs
from harness.cli.say import remark, say

MAX_EXPONENT = 0.25
"""Of cost ~ size^e, beyond the exponent of looking up a bare dictionary of as many names. O(n) has 1, O(sqrt n) 0.5.

A large pool outgrows the processor's caches and page tables, and so does the dictionary: that part is not ours.
"""


def bench_curve(blocks: Sequence[int], queued: Sequence[int], out: Path) -> int:
    """Measure, print, draw; returns 1 if an operation's cost grows with the size, or memory exceeds the limit."""
    costs = [cost for size in sorted(set(blocks)) for cost in block_costs(size)]
    costs += [cost for size in sorted(set(queued)) for cost in queue_costs(size)]
    for line in curve_lines(costs):
        say(line)
    memory = footprint(max(blocks), QUEUED)
    say(memory_line(memory))
    content = {"costs": [asdict(cost) for cost in costs], "memory": asdict(memory)}
    (out / "curve.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _draw(costs, out / "curve.svg")
    growing = growing_operations(costs)
    for name in growing:
        remark(f"error: the cost of '{name}' grows with the size")
    if memory.peak_mb > LIMIT_MB:
        remark(f"error: {memory.peak_mb:,.0f} MB are needed, {LIMIT_MB:,} MB are allowed")
    return 1 if growing or memory.peak_mb > LIMIT_MB else 0


def by_operation(costs: Sequence[Cost]) -> Mapping[str, list[Cost]]:
    """Costs of each operation by ascending size."""
    found: dict[str, list[Cost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.size):
        found.setdefault(cost.operation, []).append(cost)
    return found


def exponents(costs: Sequence[Cost]) -> dict[str, float]:
    """e in cost ~ size^e between the smallest and the largest size; 0 where there is one size."""
    found = {}
    for name, curve in by_operation(costs).items():
        first, last = curve[0], curve[-1]
        sizes = last.size / first.size
        found[name] = math.log(last.ns / first.ns) / math.log(sizes) if sizes > 1 else 0.0
    return found


def growing_operations(costs: Sequence[Cost]) -> list[str]:
    """Operations whose cost grows with the size, beyond what it does to a bare dictionary."""
    exponent = exponents(costs)
    allowed = MAX_EXPONENT + max(0.0, exponent.get(CONTROL, 0.0))
    return [name for name, found in exponent.items() if name != CONTROL and found > allowed]


def curve_lines(costs: Sequence[Cost]) -> list[str]:
    """The costs as text: a line an operation, a column a size, and how much the last is above the first."""
    lines, header = [], ""
    exponent = exponents(costs)
    for name, curve in sorted(by_operation(costs).items(), key=lambda pair: (pair[1][0].of, pair[0])):
        wanted = f"{'ns each, by ' + curve[0].of:<22}" + "".join(f"{cost.size:>11,}" for cost in curve)
        if wanted != header:
            lines.append(f"{wanted}{'last/first':>12} {'exponent':>9}")
            header = wanted
        figures = "".join(f"{cost.ns:>11,.0f}" for cost in curve)
        lines.append(f"{name:<22}{figures}{curve[-1].ns / curve[0].ns:>12.2f} {exponent[name]:>9.2f}")
    return lines


def memory_line(memory: Footprint) -> str:
    """The footprint as text."""
    return (
        f"{memory.blocks:,} live, named blocks and {memory.queued:,} queued requests: "
        f"{memory.peak_mb:,.0f} MB at the peak of a fresh process ({memory.imports_mb:,.0f} MB of imports, "
        f"{memory.block_bytes:,.0f} bytes a block, {memory.request_bytes:,.0f} a queued request)"
    )


def _draw(costs: Sequence[Cost], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    from harness.report.style import PAGE_IN, PALETTE, RC

    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, 2, figsize=(PAGE_IN, 3.0), layout="constrained")
        for axis, of in zip(axes, ("blocks", "requests"), strict=True):
            curves = by_operation([cost for cost in costs if cost.of == of])
            for number, (name, curve) in enumerate(curves.items()):
                axis.plot(
                    [cost.size for cost in curve],
                    [cost.ns for cost in curve],
                    color=PALETTE[number % len(PALETTE)],
                    linestyle="-" if number < len(PALETTE) else "--",
                    marker="o",
                    label=name,
                )
            axis.set(xscale="log", yscale="log", ylabel="CPU time, ns each")
            axis.set_xlabel("blocks in the pool" if of == "blocks" else "requests in the queue")
            axis.set_ylim(bottom=10)
            axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=0.8)
        figure.savefig(file)
        plt.close(figure)
