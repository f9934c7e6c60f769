"""The fixed work of the yardstick, which is done in the process of the steps that it judges.

It imports nothing of PageTwin, because that may be vLLM's process. What slows a core down, and what its caches hold,
differs between processes: in one beside the engine the same work tells another pace.
"""

from collections.abc import Callable

import numpy as np
import torch

_ROWS, _INNER, _WIDE = 8, 256, 512  # a product whose operands fit in the second cache of a core
_LOOPS = 750
_FLOATS = 256 * 1024  # 1 MB: a step of any model in use pushes it out of the nearest caches


class FixedWork:
    """Work of about 0.1 ms in each of three parts: arithmetic, Python code, reading memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = torch.ones(_ROWS, _INNER)
        self._right = torch.ones(_INNER, _WIDE)
        self._memory = np.ones(_FLOATS, dtype=np.float32)
        self.seconds()  # the first use of a library is slow

    def seconds(self) -> tuple[float, float, float]:
        """Do the work; the seconds of each part."""
        begun = self._clock()
        torch.mm(self._left, self._right)
        torch.mm(self._left, self._right)
        multiplied = self._clock()
        slots: dict[int, int] = {}
        for number in range(_LOOPS):
            slots[number & 63] = number
        counted = self._clock()
        self._memory.sum()
        return multiplied - begun, counted - multiplied, self._clock() - counted
