"""Virtual time in whole nanoseconds: sums are exact, so the order of events never hangs on rounding."""

from typing import Any

import numpy as np
import numpy.typing as npt

NS_PER_S = 1_000_000_000
NsArray = npt.NDArray[np.int64]


def to_ns(seconds: float | npt.NDArray[np.float64]) -> Any:
    """Seconds to the nearest whole nanosecond, int or int64 array."""
    if isinstance(seconds, np.ndarray):
        return np.rint(seconds * NS_PER_S).astype(np.int64)
    return round(seconds * NS_PER_S)


def to_s(nanoseconds: int | NsArray) -> Any:
    """Nanoseconds to seconds."""
    return nanoseconds / NS_PER_S
