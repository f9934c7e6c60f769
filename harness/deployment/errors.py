"""The error of this package. Its message says which file, line and field is wrong, and what was expected there."""

from harness.config.errors import UserError
from traces.errors import TraceError


class DeploymentError(TraceError, UserError):
    """A log or a file of settings that cannot be used, placed as a `TraceError` is.

    In a file that holds one JSON value `field` is the path inside it.
    """
