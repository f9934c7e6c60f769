"""Prediction beside measurement: per point a row a metric, over a sweep the verdict."""

from harness.compare.interval import median_interval
from harness.compare.rows import Row, compare, comparison_error
from harness.compare.verdict import MetricVerdict, Verdict, judge

__all__ = [
    "MetricVerdict",
    "Row",
    "Verdict",
    "compare",
    "comparison_error",
    "judge",
    "median_interval",
]
