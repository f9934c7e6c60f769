"""Program: a trial of the latency gate on this device, with two runs of the same code and a planted slowdown of 5 %.

The first run is the baseline. The second run must raise no alarm. Then one ratio after the other is made 5 % longer,
and the gate must detect it. This program changes the numbers in memory. The gate itself has no switch for it, and no
planted number is written as a baseline or a record.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.console import remark, say
from harness.gate import latency as layer
from harness.gate.findings import GateVerdict, Measured, new_baseline
from harness.store.atomic import write_files

SLOWER = 1.05
Judge = Callable[[Measured, Any], Any]


def main(words: Sequence[str] | None = None) -> int:
    """Run the trial; returns the exit code."""
    parser = argparse.ArgumentParser(description="Two runs of the latency gate, and a planted slowdown.")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON of both runs and the verdicts")
    parser.add_argument("--dry-run", action="store_true", help="list the cases, time nothing")
    flags = parser.parse_args(words)
    if flags.dry_run:
        for name in layer.case_names():
            say(name)
        say("nothing was measured")
        return 0
    file = Path(flags.out)
    first = layer.measure()
    _keep(file.with_name("gate_baseline.json"), asdict(new_baseline(first, "first run of a trial")))
    found = trial(first, layer.measure())
    _keep(file, found)
    say(
        f"{len(found['alarms'])} false alarms and {found['caught']} of {found['planted']} planted slowdowns caught"
    )
    for line in (*first.remarks, *found["alarms"], *found["missed"]):
        remark(line)
    return 0


def trial(first: Measured, second: Measured) -> dict[str, Any]:
    """The verdicts on the same code, and on every planted slowdown, one ratio at a time."""
    baseline = new_baseline(first, "first run of a trial")
    same = layer.judge(second, baseline)
    by_verdict = {
        verdict: [f"{one.case}: {one.reason}" for one in same.findings if one.verdict is verdict]
        for verdict in GateVerdict
    }
    planted = {case: _verdict_of(layer.judge(slowed(second, case), baseline), case) for case in second.cases}
    missed = [case for case, verdict in planted.items() if verdict is not GateVerdict.regressed]
    return {
        "made_on": dict(first.made_on),
        "kernels": first.kernels,
        "cases": len(second.cases),
        "alarms": by_verdict[GateVerdict.regressed],
        "inconclusive": by_verdict[GateVerdict.inconclusive],
        "slower": SLOWER,
        "planted": len(planted),
        "caught": len(planted) - len(missed),
        "missed": [f"{case}: {planted[case]}" for case in missed],
        "runs": {"first": dict(first.cases), "second": dict(second.cases)},
    }


def slowed(measured: Measured, case: str) -> Measured:
    """The run with every round of one ratio 5 % longer. Its name says so and is not the name of any baseline."""
    values: Mapping[str, Any] = measured.cases[case]
    longer = {**values, "ratios": [SLOWER * ratio for ratio in values["ratios"]]}
    return replace(
        measured,
        name=f"{measured.name}-planted",
        cases={**measured.cases, case: longer},
        remarks=(*measured.remarks, f"planted: {case} is {SLOWER:g} times as long as measured"),
    )


def _verdict_of(result: Any, case: str) -> GateVerdict:
    verdicts: dict[str, GateVerdict] = {finding.case: finding.verdict for finding in result.findings}
    return verdicts.get(case, GateVerdict.inconclusive)


def _keep(file: Path, content: Mapping[str, Any]) -> None:
    write_files(file.parent, {file.name: (json.dumps(content, indent=1) + "\n").encode()})


if __name__ == "__main__":
    raise SystemExit(main())
