"""One point of a sweep: check it, predict it, measure it, compare both sides, and make the record.

`run_point` and `point_stages` run a point alone. Points of one sweep share a `PointSession`.
"""

from harness.point.run import PointResult, PointSession, check_point, point_identity, point_stages, run_point

__all__ = ["PointResult", "PointSession", "check_point", "point_identity", "point_stages", "run_point"]
