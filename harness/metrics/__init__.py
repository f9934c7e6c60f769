"""Metrics: figures of merit, computed from the log of a run.

One set of definitions serves the simulated side, the measured side and the report.
"""

from harness.metrics.analytic import CacheShape, Lengths, analytic_metrics
from harness.metrics.compute import compute_metrics
from harness.metrics.definitions import HEADLINE, METRICS, Metric
from harness.metrics.log import REQUEST_COLUMNS, SLOT_STATES, STEP_COLUMNS, Outcome, RunLog, RunLogError

__all__ = [
    "HEADLINE",
    "METRICS",
    "REQUEST_COLUMNS",
    "SLOT_STATES",
    "STEP_COLUMNS",
    "CacheShape",
    "Lengths",
    "Metric",
    "Outcome",
    "RunLog",
    "RunLogError",
    "analytic_metrics",
    "compute_metrics",
]
