"""One point of a sweep: its requests, its pool, its prediction, its measurement, its record."""

from harness.point.identity import point_identity
from harness.point.run import PointResult, check_point, run_point

__all__ = ["PointResult", "check_point", "point_identity", "run_point"]
