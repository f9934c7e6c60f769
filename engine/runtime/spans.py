"""How long the attention function ran, summed over a step's layers, without waiting for the device in between."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Spans(Protocol):
    """Times the stretches between `begin()` and `end()`."""

    def begin(self) -> Any:
        """Start a stretch; pass what this returns to `end`."""
        ...

    def end(self, began: Any) -> None:
        """End the stretch."""
        ...

    def total_s(self) -> float:
        """Seconds of all stretches since the last call of this method."""
        ...


class ClockSpans:
    """On the CPU work is done when a call returns: two readings of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0

    def begin(self) -> float:
        """The clock now."""
        return self._clock()

    def end(self, began: float) -> None:
        """Add the time since `began`."""
        self._seconds += self._clock() - began

    def total_s(self) -> float:
        """Seconds so far, and start anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CudaSpans:
    """On a GPU the device marks the stretches itself, so that no layer waits for the one before it."""

    def __init__(self) -> None:
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> torch.cuda.Event:
        """An event at this place of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end(self, began: torch.cuda.Event) -> None:
        """A second event at this place of the stream."""
        self._stretches.append((began, self.begin()))

    def total_s(self) -> float:
        """Seconds between the events; the caller has synchronised the device."""
        milliseconds = [float(began.elapsed_time(ended)) for began, ended in self._stretches]
        self._stretches.clear()
        return sum(milliseconds) / 1e3


class NoSpans:
    """Times nothing: for passes that are not the model's own."""

    def begin(self) -> None:
        """Nothing begins."""

    def end(self, began: None) -> None:
        """Nothing ends."""

    def total_s(self) -> float:
        """No time."""
        return 0.0


NO_SPANS = NoSpans()
