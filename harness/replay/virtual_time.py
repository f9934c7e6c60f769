"""Virtual time in whole nanoseconds: sums are exact, so the order of events does not depend on rounding."""

from typing import Any

import numpy as np

from harness.metrics.log import FloatArray, IntArray

NS_PER_S = 1_000_000_000
LATEST_NS = 2**62  # 146 years; the sum of two times must fit into 64 bits
_TOO_LONG = (
    "the replay would last longer than 146 years, beyond what its clock counts; a rate or a figure of the device "
    "(device.*) is too small, or one of its latencies too large"
)


class TimeSpanError(OverflowError):
    """A replay would last longer than `LATEST_NS`."""

    def __init__(self, message: str = _TOO_LONG) -> None:
        super().__init__(message)


def to_ns(seconds: float | FloatArray) -> Any:
    """Seconds to the nearest whole nanosecond, int or int64 array."""
    if isinstance(seconds, np.ndarray):
        return np.rint(seconds * NS_PER_S).astype(np.int64)
    return round(seconds * NS_PER_S)


def to_s(nanoseconds: int | IntArray) -> Any:
    """Nanoseconds to seconds."""
    return nanoseconds / NS_PER_S
