"""A part's goals against what lies in its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path

from harness.bench.gpu.goals.checks import memcheck_findings, test_findings
from harness.bench.gpu.goals.engine import engine_findings
from harness.bench.gpu.goals.goal import Found, Judged, missing
from harness.bench.gpu.goals.kernels import kernel_findings
from harness.bench.gpu.goals.listed import GOALS
from harness.bench.gpu.goals.prediction import prediction_findings
from harness.bench.gpu.goals.rows import timed_cases


def judge_part(part: str, out: Path) -> list[Judged]:
    """Every goal of the part, measured or not, in the order of `GOALS`."""
    found = _FINDERS[part](out)
    return [Judged(goal, found.get(goal.key, missing("not measured"))) for goal in GOALS[part]]


def _kernels(out: Path) -> dict[str, Found]:
    checks = {"tests": test_findings(out / "tests.xml"), "memcheck": memcheck_findings(out / "memcheck.txt")}
    return checks | kernel_findings(timed_cases(out))


_FINDERS: Mapping[str, Callable[[Path], dict[str, Found]]] = {
    "quick": _kernels,
    "kernels": _kernels,
    "engine": engine_findings,
    "prediction": prediction_findings,
}
