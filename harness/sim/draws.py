"""Chance that depends on the place alone: the same request draws the same, whatever runs beside it."""

SCALE = 2**32
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Draws:
    """Uniform integers for one place of a request: the SplitMix64 mixer (Steele, Lea and Flood 2014) over a counter."""

    def __init__(self, seed: int, request_id: int, place: int) -> None:
        self._state = (seed * 0xA0761D6478BD642F ^ request_id * 0xD1B54A32D192ED03 ^ place * _GOLDEN) & _MASK

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit - 1`."""
        self._state = (self._state + _GOLDEN) & _MASK
        word = self._state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((word ^ (word >> 31)) * limit) >> 64

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens, to 2^-32."""
        return self.below(SCALE) < probability * SCALE
