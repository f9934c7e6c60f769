"""Fed with measured durations the simulated side decides as the engine did, whatever the policy, mode and format."""

from dataclasses import replace
from pathlib import Path

from point_matrix import ALL, SOME, Case
from tiers import cases

from harness.config.schema import TraceFormat
from harness.point import run_point


@cases(("format_", "policy", "mode"), ALL, day=SOME[::4], night=40)
def test_measured_durations_give_identical_plans(
    format_: TraceFormat, policy: str, mode: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, format_, policy, mode)
    record = run_point(replace(case.config, measure=True)).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.outcome["measured"] == record.outcome["simulated"]
