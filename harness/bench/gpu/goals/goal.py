"""A goal, and what was found of it."""

from dataclasses import dataclass
from enum import StrEnum


class Sense(StrEnum):
    """On which side of the aim a figure must lie."""

    most = "at most"
    least = "at least"
    shown = "shown"  # a figure to be reported; there is no aim


class Unit(StrEnum):
    """How a figure is printed."""

    share = "share"
    ratio = "ratio"
    number = "number"


@dataclass(frozen=True)
class Goal:
    """One figure of one part. `row` is what the project asks for in its own words, `source` where the aim is from."""

    key: str
    row: str
    figure: str
    sense: Sense
    aim: float | None
    unit: Unit
    source: str = "project goal for the H200"

    def met(self, found: float | None) -> bool | None:
        """Whether a figure reaches the aim; None where nothing was measured, or nothing is aimed at.

        NaN reaches no aim.
        """
        if found is None or self.aim is None:
            return None
        return found <= self.aim if self.sense is Sense.most else found >= self.aim

    def shown(self, value: float) -> str:
        """A figure in the goal's unit."""
        if self.unit is Unit.share:
            return f"{value:.1%}"
        return f"{value:.3g}×" if self.unit is Unit.ratio else f"{value:g}"

    @property
    def wanted(self) -> str:
        """The aim in words."""
        return "–" if self.aim is None else f"{self.sense} {self.shown(self.aim)}"


@dataclass(frozen=True)
class Found:
    """The figure of a goal, where it comes from (the worst case, mostly), or why there is none."""

    value: float | None
    where: str


def missing(reason: str) -> Found:
    """No figure, and why."""
    return Found(None, reason)


@dataclass(frozen=True)
class Judged:
    """A goal with what was found."""

    goal: Goal
    found: Found

    @property
    def met(self) -> bool | None:
        """See `Goal.met`."""
        return self.goal.met(self.found.value)

    @property
    def verdict(self) -> str:
        """`yes`, `no`, `shown` (no aim) or `not measured`."""
        if self.found.value is None:
            return "not measured"
        return "shown" if self.met is None else "yes" if self.met else "no"
