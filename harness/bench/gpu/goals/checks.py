"""What the test run and the memory checker left."""

import re
from pathlib import Path
from xml.etree import ElementTree

from harness.bench.gpu.goals.goal import Found, missing

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def test_findings(file: Path) -> Found:
    """From pytest's JUnit file: tests that failed; tests that were skipped are said, for they prove nothing."""
    if not file.exists():
        return missing("the tests did not finish")
    try:
        suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    except ElementTree.ParseError as error:
        return missing(f"{file.name} is cut off: {error}")
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    if total == skipped:
        return missing(f"none of {total} tests ran")
    return Found(failed + errors, f"of {total}, {skipped} skipped")


def memcheck_findings(file: Path) -> Found:
    """From compute-sanitizer's log: errors of all processes that it watched."""
    if not file.exists():
        return missing("compute-sanitizer did not run")
    counts = [int(found) for found in _SUMMARY.findall(file.read_text(encoding="utf-8", errors="replace"))]
    if not counts:
        return missing(f"{file.name} has no summary: the checker did not finish")
    return Found(sum(counts), f"{len(counts)} processes")
