"""Records of a run turned into figures of merit: one set of definitions, used for both sides and printed in the report.

NumPy only, because simulation-only sweeps compute thousands of these and must not pay for pandas or scipy.
"""

from harness.metrics.log import REQUEST_COLUMNS, STEP_COLUMNS, Outcome, RunLog, RunLogError

__all__ = ["REQUEST_COLUMNS", "STEP_COLUMNS", "Outcome", "RunLog", "RunLogError"]
