"""How beams descend from one another, where no model says it: so many of them are dropped a step.

What sharing and copy-on-write cost depends only on who continues whom. With `width` beams of which `d` get a child,
exactly `width - d` tails are copied (off a block boundary), so the one parameter is the share that gets none.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence


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
        key = hashlib.blake2b(b"%d:%d:%d" % (self._seed, request_id, generated), digest_size=8).digest()
        draw = random.Random(int.from_bytes(key, "little"))
        mean = width * (1 - self.churn_of(width))
        survivors = min(width, max(1, int(mean) + (draw.random() < mean - int(mean))))
        chosen = sorted(draw.sample(range(width), survivors))
        return sorted(chosen + draw.choices(chosen, k=width - survivors))

    def churn_of(self, width: int) -> float:
        """The churn of the nearest known width; a third, which small random models show, where nothing is known."""
        if not self._churn:
            return 1 / 3
        return self._churn[min(self._churn, key=lambda known: (abs(known - width), known))]


def churn_of_run(width: int, distinct_parents: Sequence[int]) -> float:
    """Mean share of `width` beams without a child, from the number of distinct parents at each step."""
    if not distinct_parents:
        return 0.0
    return 1 - sum(distinct_parents) / (width * len(distinct_parents))
