"""How beams descend from one another, where no model says it: a chance of re-parenting per hypothesis and step."""

import hashlib
import random
from collections.abc import Mapping, Sequence


class BeamGenealogy:
    """Draws parents: hypothesis i continues beam i, or with probability `churn` a beam drawn uniformly.

    `churn` by beam width comes from measured runs (the nearest width is used) or from the user. Draws depend on
    (seed, request, step of the request) alone, so that the batch around a request changes nothing.
    """

    def __init__(self, churn: Mapping[int, float], seed: int = 0) -> None:
        self._churn = dict(churn)
        self._seed = seed

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """Parent of each hypothesis when the request chooses its token number `generated`."""
        key = hashlib.blake2b(b"%d:%d:%d" % (self._seed, request_id, generated), digest_size=8).digest()
        draw = random.Random(int.from_bytes(key, "little"))
        churn = self.churn_of(width)
        return [draw.randrange(width) if draw.random() < churn else beam for beam in range(width)]

    def churn_of(self, width: int) -> float:
        """The churn of the nearest known width; 0.5 where nothing is known."""
        if not self._churn:
            return 0.5
        return self._churn[min(self._churn, key=lambda known: (abs(known - width), known))]


def churn_from_survivors(width: int, distinct_parents: Sequence[int]) -> float:
    """The churn that explains the mean number of distinct parents of `width` beams, by bisection.

    Under the model a beam has no child with probability c q^(k-1) + ... ; its closed form is below: beam i keeps its
    own child unless re-parented away (probability c (1 - 1/k)), and each other hypothesis misses it with
    probability 1 - c / k. So E[distinct] = k (1 - c (1 - 1/k) (1 - c/k)^(k-1)).
    """
    if width < 2 or not distinct_parents:
        return 0.0
    mean = sum(distinct_parents) / len(distinct_parents)

    def expected(churn: float) -> float:
        return width * (1 - churn * (1 - 1 / width) * (1 - churn / width) ** (width - 1))

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > mean else (low, middle)
    return (low + high) / 2
