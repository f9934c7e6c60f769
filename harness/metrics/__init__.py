"""Records of a run turned into figures of merit: one set of definitions, for both sides and for the report.

NumPy only, because simulation-only sweeps compute thousands of these and must not pay for pandas or scipy.
"""

from harness.metrics.analytic import CacheShape, analytic_metrics
from harness.metrics.closed_forms import Lengths
from harness.metrics.compute import compute_metrics
from harness.metrics.definitions import HEADLINE, METRICS
from harness.metrics.log import REQUEST_COLUMNS, SLOT_STATES, STEP_COLUMNS, Outcome, RunLog, RunLogError
from harness.metrics.metric import Metric

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
