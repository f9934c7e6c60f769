"""The parents of beams: recorded ones, or draws from a model of how beams coalesce.

The parameters of the model are fitted to the parents that measured runs recorded.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from harness.replay.branches import SCALE, SplitMix64

EVEN = 1e6
"""Evenness from which the survivors get further children uniformly."""

Choices = Sequence[Sequence[int]]
"""Parents of each hypothesis, one entry per selection."""


class Genealogy(Protocol):
    """A source of beam parents."""

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """Parent of each hypothesis when the request chooses its token number `generated` (from 1)."""


class BeamGenealogy:
    """Draws parents such that on average a share `churn` of the beams is dropped in a step.

    `churn` and `evenness` by beam width come from measured runs (the nearest width is used) or from the user. Draws
    depend on (seed, request, token number) alone, and not on the batch.
    """

    def __init__(
        self, churn: Mapping[int, float], seed: int = 0, evenness: Mapping[int, float] | None = None
    ) -> None:
        self._churn = dict(churn)
        self._evenness = dict(evenness or {})
        self._seed = seed

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """Parents of each hypothesis: each of a random subset has one child, an urn distributes the other children."""
        draw = SplitMix64(self._seed, request_id, generated)
        mean = width * (1 - self.churn_of(width))
        survivors = min(width, max(1, int(mean) + (draw.below(SCALE) < (mean - int(mean)) * SCALE)))
        beams = list(range(width))
        for place in range(width - survivors):  # the first places of a partial shuffle are dropped
            other = place + draw.below(width - place)
            beams[place], beams[other] = beams[other], beams[place]
        chosen = beams[width - survivors :]
        return sorted(chosen + self._further(draw, chosen, width - survivors, width))

    def _further(self, draw: SplitMix64, survivors: Sequence[int], places: int, width: int) -> list[int]:
        """Parents of further children, drawn from an urn: any survivor with probability a d / (a d + children so far),
        else the parent of an earlier further child. a is the evenness, d the number of survivors.
        """
        evenness = self.evenness_of(width)
        given: list[int] = []
        for _ in range(places):
            fresh = evenness * len(survivors)
            if evenness >= EVEN or not given or draw.below(SCALE) < fresh / (fresh + len(given)) * SCALE:
                given.append(survivors[draw.below(len(survivors))])
            else:
                given.append(given[draw.below(len(given))])
        return given

    def evenness_of(self, width: int) -> float:
        """The evenness of the nearest known width."""
        return _nearest(self._evenness, width, EVEN)

    def churn_of(self, width: int) -> float:
        """The churn of the nearest known width; without any a third, which small random models show."""
        return _nearest(self._churn, width, 1 / 3)


class RecordedGenealogy:
    """Replays parents that a run recorded, exactly; `steps` as `Recorder.parents` holds them."""

    def __init__(self, steps: Iterable[Mapping[int, Sequence[int]]]) -> None:
        self._chosen: dict[int, list[Sequence[int]]] = {}
        for step in steps:
            for request_id, parents in step.items():
                self._chosen.setdefault(request_id, []).append(parents)

    @classmethod
    def of_requests(cls, chosen: Mapping[int, Sequence[Sequence[int]]]) -> "RecordedGenealogy":
        """From the selections of each request, in order."""
        found = cls(())
        found._chosen = {request_id: list(choices) for request_id, choices in chosen.items()}
        return found

    @property
    def chosen(self) -> Mapping[int, Sequence[Sequence[int]]]:
        """Parents by request, one entry for each of its selections."""
        return self._chosen

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """As recorded.

        Raises:
            KeyError: the recording does not hold the request.
            IndexError: it does not hold the selection.
        """
        return list(self._chosen[request_id][generated])


def _nearest(known: Mapping[int, float], width: int, otherwise: float) -> float:
    if not known:
        return otherwise
    return known[min(known, key=lambda other: (abs(other - width), other))]


def choices_of_run(steps: Sequence[Mapping[int, Sequence[int]]]) -> list[list[Sequence[int]]]:
    """A run's selections, one list for each request, without its first selection, which always has one parent."""
    by_request: dict[int, list[Sequence[int]]] = {}
    for step in steps:
        for request_id, parents in step.items():
            by_request.setdefault(request_id, []).append(parents)
    return [choices[1:] for choices in by_request.values()]


def churn_of_run(width: int, distinct_parents: Sequence[int]) -> float:
    """Mean share of `width` beams without a child, from the number of distinct parents at each step."""
    if not distinct_parents:
        return 0.0
    return 1 - sum(distinct_parents) / (width * len(distinct_parents))


def evenness_of_run(choices: Choices) -> float:
    """The evenness whose expected pairs of siblings equal the observed ones; EVEN where it makes no difference.

    With d survivors and e places beyond one each, n_i children of survivor i have
    E[sum n_i (n_i - 1)] = e (e - 1) (a + 1) / (d a + 1) + 2 e: the Dirichlet-multinomial's second moment.
    """
    seen, places = 0, []
    for parents in choices:
        children = Counter(parents)
        extra = len(parents) - len(children)
        seen += sum(n * (n - 1) for n in children.values()) - 2 * extra
        places.append((len(children), extra * (extra - 1)))

    def expected(a: float) -> float:
        return sum(pairs * (a + 1) / (d * a + 1) for d, pairs in places)

    if seen <= expected(EVEN):
        return EVEN
    low, high = 1e-6, EVEN
    for _ in range(80):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if expected(middle) > seen else (low, middle)
    return low
