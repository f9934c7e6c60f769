"""One point of a sweep: it is checked, predicted, measured, compared and recorded here."""

from harness.point.run import PointResult, check_point, point_identity, run_point

__all__ = ["PointResult", "check_point", "point_identity", "run_point"]
