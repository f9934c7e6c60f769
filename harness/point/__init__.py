"""One point of a sweep: check it, predict it, measure it, compare both sides, and make the record."""

from harness.point.run import PointResult, check_point, point_identity, point_stages, run_point

__all__ = ["PointResult", "check_point", "point_identity", "point_stages", "run_point"]
