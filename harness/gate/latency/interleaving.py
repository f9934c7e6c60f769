"""Rounds in which a kernel and its yardsticks take turns, until the ratios are known well enough."""

from collections.abc import Callable, Mapping, Sequence

from harness.gate.effect import effect

Round = Callable[[], float]  # seconds per call

FEWEST, MOST, STEP = 30, 150, 20
PRECISE = 0.02  # stop when the bounds of the ratio's median are no further apart than this


def interleaved(kernel: Round, yardsticks: Mapping[str, Round]) -> dict[str, list[float]]:
    """Ratios of kernel to each yardstick, one a round.

    Each round runs everything twice, the second time in the opposite order (A B C C B A), so that a slow drift cancels
    within it. The number of rounds depends on their spread alone, never on the ratio that they show.
    """
    ratios: dict[str, list[float]] = {name: [] for name in yardsticks}
    while True:
        for name, ratio in _round(kernel, yardsticks).items():
            ratios[name].append(ratio)
        done = len(next(iter(ratios.values())))
        if done >= MOST or (
            done >= FEWEST and (done - FEWEST) % STEP == 0 and all(map(precise, ratios.values()))
        ):
            return ratios


def precise(ratios: Sequence[float]) -> bool:
    """Whether more rounds would tell little more."""
    found = effect(ratios, ratios)
    return found.upper - found.lower <= PRECISE


def _round(kernel: Round, yardsticks: Mapping[str, Round]) -> dict[str, float]:
    first = kernel()
    there = {name: run() for name, run in yardsticks.items()}
    back = {name: run() for name, run in reversed(list(yardsticks.items()))}
    mine = first + kernel()
    return {name: round(mine / (there[name] + back[name]), 6) for name in yardsticks}
