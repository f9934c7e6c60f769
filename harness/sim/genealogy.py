"""How beams descend from one another: as recorded, or drawn from a model of how they coalesce.

What sharing and copy-on-write cost depends only on who continues whom. The model is a survival process: in a step each
of `width` beams is dropped with hazard `churn`, and the survivors share the places that became free. How unevenly they
do is its second parameter, `evenness`: the weight `a` of a Polya urn, in which a survivor gets the next place with
probability proportional to `a` plus the places it got before; infinite is uniform, 0 gives all to one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from harness.sim.draws import SCALE, Draws

EVEN = 1e6
"""Evenness from which places are shared out uniformly."""


class Genealogy(Protocol):
    """Says whom each beam continues."""

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """Parent of each hypothesis when the request chooses its token number `generated` (from 1)."""
        ...


class BeamGenealogy:
    """Draws parents such that on average a share `churn` of the beams is dropped in a step.

    `churn` and `evenness` by beam width come from measured runs (the nearest width is used) or from the user. Draws
    depend on (seed, request, token number) alone, so that the batch around a request changes nothing.
    """

    def __init__(
        self, churn: Mapping[int, float], seed: int = 0, evenness: Mapping[int, float] | None = None
    ) -> None:
        self._churn = dict(churn)
        self._evenness = dict(evenness or {})
        self._seed = seed

    def parents(self, request_id: int, generated: int, width: int) -> list[int]:
        """Survivors are a random subset; each has a child, and an urn shares out the places left."""
        draw = Draws(self._seed, request_id, generated)
        mean = width * (1 - self.churn_of(width))
        survivors = min(width, max(1, int(mean) + (draw.below(SCALE) < (mean - int(mean)) * SCALE)))
        beams = list(range(width))
        for place in range(width - survivors):  # the first places of a partial shuffle are dropped
            other = place + draw.below(width - place)
            beams[place], beams[other] = beams[other], beams[place]
        chosen = beams[width - survivors :]
        return sorted(chosen + self._further(draw, chosen, width - survivors, width))

    def _further(self, draw: Draws, survivors: Sequence[int], places: int, width: int) -> list[int]:
        """An urn without counters: a fresh survivor with probability a d / (a d + places given), else a copy."""
        evenness = _nearest(self._evenness, width, EVEN)
        given: list[int] = []
        for _ in range(places):
            fresh = evenness * len(survivors)
            if evenness >= EVEN or not given or draw.below(SCALE) < fresh / (fresh + len(given)) * SCALE:
                given.append(survivors[draw.below(len(survivors))])
            else:
                given.append(given[draw.below(len(given))])
        return given

    def churn_of(self, width: int) -> float:
        """The churn of the nearest known width; a third, which small random models show, where nothing is known."""
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
        """As recorded; raises KeyError or IndexError for a choice that the recording does not hold."""
        return list(self._chosen[request_id][generated])


def _nearest(known: Mapping[int, float], width: int, otherwise: float) -> float:
    if not known:
        return otherwise
    return known[min(known, key=lambda other: (abs(other - width), other))]
