"""How much of the time that a user allows is spent."""

import time


class Budget:
    """Seconds of wall time from now on; None is without end."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._begun = time.perf_counter()

    @property
    def limited(self) -> bool:
        """Whether it ever ends."""
        return self._seconds is not None

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    def left(self, share: float = 1.0) -> bool:
        """Whether less than `share` of the budget is spent."""
        return self._seconds is None or self.spent_s < share * self._seconds
