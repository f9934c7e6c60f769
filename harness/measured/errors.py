"""What can go wrong on the measured side, beside the engine's own errors."""


class CalibrationError(RuntimeError):
    """A calibration that is missing, damaged, or could not be made."""
