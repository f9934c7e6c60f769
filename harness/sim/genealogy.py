"""How beams descend from one another, where no model says it: so many of them are dropped a step.

What sharing and copy-on-write cost depends only on who continues whom. With `width` beams of which `d` get a child,
exactly `width - d` tails are copied (off a block boundary), so the one parameter is the share that gets none.
"""

from collections.abc import Mapping, Sequence

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SCALE = 2**32


class BeamGenealogy:
    """Draws parents such that on average a share `churn` of the beams is dropped in a step.

    `churn` by beam width comes from measured runs (the nearest width is used) or from the user. Draws depend on
    (seed, request, token number) alone, so that the batch around a request changes nothing.
    """

    def __init__(self, churn: Mapping[int, float], seed: int = 0) -> None:
        self._churn = dict(churn)
        self._seed = seed

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """Parent of each hypothesis when the request chooses its token number `generated`.

        Survivors are a random subset; each has a child, and further children fall to survivors at random.
        """
        draw = _Draws(self._seed, request_id, generated)
        mean = width * (1 - self.churn_of(width))
        survivors = min(width, max(1, int(mean) + (draw.below(_SCALE) < (mean - int(mean)) * _SCALE)))
        beams = list(range(width))
        for place in range(width - survivors):  # the first places of a partial shuffle are dropped
            other = place + draw.below(width - place)
            beams[place], beams[other] = beams[other], beams[place]
        chosen = beams[width - survivors :]
        return sorted(chosen + [chosen[draw.below(survivors)] for _ in range(width - survivors)])

    def churn_of(self, width: int) -> float:
        """The churn of the nearest known width; a third, which small random models show, where nothing is known."""
        if not self._churn:
            return 1 / 3
        return self._churn[min(self._churn, key=lambda known: (abs(known - width), known))]


class _Draws:
    """Uniform integers from a counter: the SplitMix64 mixer (Steele, Lea and Flood 2014) over a key of the place."""

    def __init__(self, seed: int, request_id: int, generated: int) -> None:
        self._state = (
            seed * 0xA0761D6478BD642F ^ request_id * 0xD1B54A32D192ED03 ^ generated * _GOLDEN
        ) & _MASK

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit - 1`."""
        self._state = (self._state + _GOLDEN) & _MASK
        word = self._state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((word ^ (word >> 31)) * limit) >> 64


def churn_of_run(width: int, distinct_parents: Sequence[int]) -> float:
    """Mean share of `width` beams without a child, from the number of distinct parents at each step."""
    if not distinct_parents:
        return 0.0
    return 1 - sum(distinct_parents) / (width * len(distinct_parents))
