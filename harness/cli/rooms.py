"""Which modules do the work behind the commands; tests put light ones in their place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rooms:
    """Names of modules, imported only by the command that needs them."""

    point: str = "harness.point"  # run_point, check_point, point_identity
    report: str = "harness.report"  # write_report, verdict_lines, ReportError
