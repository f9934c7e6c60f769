"""How often does the gate notice code that is slower by a share, and how often does it accuse unchanged code?

    python tests/nightly/gate_trials.py --slower 0.15 --slowed 20 --unchanged 40     it prints the load of the machine

The cases are those of the layers policy and cpu, and the function of examples/own_kernel. A slowed call of today's code
spins for a share of its own CPU time. The exit code is 1 if a slowdown was missed more than once in 20, or unchanged
code was accused more than once in 40.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from harness.gate import beside, cpu, policy
from harness.gate.loads import loads
from harness.gate.settings import default_settings, effect

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_kernel" / "kernel.py"
Sides = Callable[[], tuple[beside.Work, beside.Work]]


def spinning(work: beside.Work, share: float) -> beside.Work:
    """The same work, slower by a share of its CPU time."""

    def run() -> object:
        begun = time.process_time()
        result = work()
        end = begun + (1 + share) * (time.process_time() - begun)
        while time.process_time() < end:
            pass
        return result

    return run


def cases(folder: Path) -> Iterator[tuple[str, Sides]]:
    """Today's work of every case, and the same from sources that are loaded beside it."""

    def of_policy(name: str) -> tuple[beside.Work, beside.Work]:
        return loads()[name].run, beside.load(policy.sources(), folder)["harness.gate.loads"].loads()[
            name
        ].run

    def of_cpu(name: str) -> tuple[beside.Work, beside.Work]:
        data = cpu.inputs()
        ours, theirs = (cpu.works(version, data, folder)[name] for version in (None, cpu.sources()))
        return ours, theirs

    def of_example() -> tuple[beside.Work, beside.Work]:
        given = torch.randn(512, 1024), torch.ones(1024)
        sides = (beside.load({"kernel": EXAMPLE.read_text()}, folder)["kernel"].rms_norm for _ in range(2))
        ours, theirs = (partial(side, *given) for side in sides)
        return ours, theirs

    yield from ((f"policy: {name}", partial(of_policy, name)) for name in policy.case_names())
    yield from ((name, partial(of_cpu, name)) for name in cpu.case_names())
    yield "plugin: the example's function", of_example


def verdict(sides: Sides, slower: float) -> str:
    """The verdict on today's work, slower by a share."""

    def planted() -> tuple[beside.Work, beside.Work]:
        ours, theirs = sides()
        return (spinning(ours, slower) if slower else ours), theirs

    return str(effect(beside.ratios_of(planted)).verdict(default_settings().cpu))


def main() -> int:
    """Run the trials and print how often each verdict was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slower", type=float, default=0.15, help="the planted share")
    parser.add_argument("--slowed", type=int, default=20)
    parser.add_argument("--unchanged", type=int, default=40)
    parser.add_argument("-k", default="", help="only cases with this text in their name")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for case, sides in cases(Path(folder)):
            if asked.k not in case:
                continue
            for slower, trials in ((asked.slower, asked.slowed), (0.0, asked.unchanged)):
                found = Counter(verdict(sides, slower) for _ in range(trials))
                what = f"{slower:.0%} slower" if slower else "unchanged"
                counts = ", ".join(f"{count} {name}" for name, count in found.items())
                sys.stdout.write(f"{case}, {what}: {counts}; load {os.getloadavg()[0]:.1f}\n")
                sys.stdout.flush()
                missed = trials - found["regressed"] if slower else 0
                wrong |= missed * 20 > trials or (not slower and found["regressed"] * 40 > trials)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
