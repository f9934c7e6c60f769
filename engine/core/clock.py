"""A count of decode steps, by which sequences that advance together know how far they have come."""


class StepClock:
    """Steps taken so far. Whoever reads `base + now` advances without being touched."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0
