"""The command line. Each command is one module with `add`, which describes its flags, and `run`.

Nothing here imports Hydra, torch or pandas at start. Each command imports what it needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rooms:
    """Names of modules, imported only by the command that needs them."""

    point: str = "harness.point"  # run_point, check_point, point_identity
    report: str = "harness.report"  # write_report, verdict_lines, ReportError
