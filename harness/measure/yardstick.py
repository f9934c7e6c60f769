"""The local pace of a CPU core: a fixed piece of work, the yardstick, runs between the steps of a measured run.

Other work on a machine slows a core down by a tenth to a half, for some milliseconds or for minutes. It slows
arithmetic, Python code and reads of memory by different amounts, so the yardstick has one part of each. A step's time
divided by the pace beside it is the time that the step takes at the reference pace.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

WINDOW = 8
"""Readings over which the pace is a median; about a tenth of a second of a small model's steps."""

READ_EVERY_S = 2e-3
"""Between two readings there is at least so much engine time, so that short steps do not wait for the yardstick."""

_ROWS, _INNER, _WIDE = 8, 256, 512  # a product whose operands fit in the second cache of a core
_LOOPS = 750
_FLOATS = 256 * 1024  # 1 MB: a step of any model in use pushes it out of the nearest caches


class Reading(NamedTuple):
    """Seconds of the three parts of the yardstick, about 0.1 ms each."""

    arithmetic_s: float
    python_s: float
    memory_s: float


def pace_of(reading: Reading, reference: Reading) -> float:
    """The mean of the parts' ratios; above 1 the core is slower than at the reference."""
    return fmean(now / then for now, then in zip(reading, reference, strict=True))


def middle(readings: Sequence[Reading]) -> Reading:
    """The median of each part."""
    return Reading(*(median(part) for part in zip(*readings, strict=True)))


class Yardstick:
    """Reads the pace by `clock` beside the steps of one run. Without a `reference` its own first readings are one.

    Only readings after a step count: back to back the yardstick finds its memory in the nearest caches, and is faster.
    """

    def __init__(self, clock: Callable[[], float], reference: Reading | None = None) -> None:
        import torch

        self._clock = clock
        self._left = torch.ones(_ROWS, _INNER)
        self._right = torch.ones(_INNER, _WIDE)
        self._multiply: Callable[[Any, Any], Any] = torch.mm
        self._memory = np.ones(_FLOATS, dtype=np.float32)
        self._recent: deque[Reading] = deque(maxlen=WINDOW)
        self._reference = reference
        self._since_s = READ_EVERY_S
        self._pace = 1.0
        self.readings: list[Reading] = []
        self._reading()  # the first use of a library is slow

    def pace_after(self, step_s: float) -> float:
        """The pace beside a step that has just ended after `step_s` seconds."""
        self._since_s += step_s
        if self._since_s >= READ_EVERY_S:
            self._since_s = 0.0
            found = self._reading()
            self.readings.append(found)
            self._recent.append(found)
            if self._reference is None and len(self.readings) == WINDOW:
                self._reference = middle(self.readings)
            if self._reference is not None:
                self._pace = pace_of(middle(self._recent), self._reference)
        return self._pace

    def _reading(self) -> Reading:
        clock = self._clock
        begun = clock()
        self._multiply(self._left, self._right)
        self._multiply(self._left, self._right)
        multiplied = clock()
        slots: dict[int, int] = {}
        for number in range(_LOOPS):
            slots[number & 63] = number
        counted = clock()
        self._memory.sum()
        read = clock()
        return Reading(multiplied - begun, counted - multiplied, read - counted)
