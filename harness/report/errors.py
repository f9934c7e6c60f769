"""What can go wrong before there is a report."""


class ReportError(ValueError):
    """There is nothing to report on, or the report cannot be written; the message says what to do."""
