"""How often does the CPU gate notice attention that is a fifth slower, and how often does it accuse unchanged code?

Each slowed trial makes every fifth call of today's code run twice, which is 20 % more work. Run it on a busy machine:

    python tests/nightly/cpu_gate_trials.py --slowed 20 --unchanged 40

The exit code is 1 if a slowdown was missed more than once in 20, or unchanged code was accused more than once in 40.
"""

import argparse
import os
import sys
from collections import Counter
from itertools import count
from unittest.mock import patch

from harness.gate import cpu
from harness.gate.findings import Baseline, GateVerdict

EVERY = 5  # calls of which one runs twice


def slowed(works: dict[str, cpu.Work]) -> dict[str, cpu.Work]:
    """The same works with a fifth more to do."""

    def slower(work: cpu.Work) -> cpu.Work:
        calls = count(1)

        def run() -> object:
            if next(calls) % EVERY == 0:
                work()
            return work()

        return run

    return {name: slower(work) for name, work in works.items()}


def trial(*, slow: bool) -> dict[str, GateVerdict]:
    """The verdicts of one run of the gate, today's code against itself, by case."""
    original = cpu.works

    def planted(version, data, folder):
        found = original(version, data, folder)
        return slowed(found) if slow and version is None else found

    with patch.object(cpu, "works", planted):
        measured = cpu.measure()
    accepted = Baseline(
        "cpu", {}, None, "the same sources", "today", measured.cases, {"sources": cpu.sources()}
    )
    result = cpu.judge(measured, accepted)
    return {finding.case: finding.verdict for finding in result.findings if finding.case in measured.cases}


def main() -> int:
    """Run the trials and print how often each verdict was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slowed", type=int, default=20)
    parser.add_argument("--unchanged", type=int, default=40)
    asked = parser.parse_args()
    missed = accused = 0
    for slow, trials in ((True, asked.slowed), (False, asked.unchanged)):
        seen: dict[str, Counter[str]] = {name: Counter() for name in cpu.case_names()}
        for number in range(trials):
            verdicts = trial(slow=slow)
            for case, verdict in verdicts.items():
                seen[case][verdict] += 1
            words = ", ".join(f"{case} {verdict}" for case, verdict in verdicts.items())
            sys.stderr.write(f"{'slowed' if slow else 'unchanged'} {number + 1} of {trials}: {words}\n")
        for case, counts in seen.items():
            what = "a fifth slower" if slow else "unchanged"
            words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            sys.stdout.write(f"{case}, {what}: {words}; load {os.getloadavg()[0]:.1f}\n")
            sys.stdout.flush()
            if slow:
                missed = max(missed, trials - counts[GateVerdict.regressed])
            else:
                accused = max(accused, counts[GateVerdict.regressed])
    return int(missed * 20 > asked.slowed or accused * 40 > asked.unchanged)


if __name__ == "__main__":
    sys.exit(main())
