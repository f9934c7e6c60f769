"""Interleaved rounds: order, what drift does to them, and when they stop."""

import itertools
from statistics import median

import numpy as np

from harness.gate.beside import DEVICE, interleaved


class Machine:
    """A device that gets slower with every call, and whose timings are noisy."""

    def __init__(self, drift: float = 0.0, noise: float = 0.0) -> None:
        self.calls: list[str] = []
        self._drift, self._noise = drift, noise
        self._rng = np.random.default_rng(0)

    def round_of(self, name: str, seconds: float):
        def once() -> float:
            self.calls.append(name)
            slower = 1 + self._drift * len(self.calls)
            return float(seconds * slower * np.exp(self._noise * self._rng.standard_normal()))

        return once

    def ratios(self) -> dict[str, list[float]]:
        yardsticks = {"copy": self.round_of("copy", 1.0), "contiguous": self.round_of("contiguous", 2.0)}
        return interleaved(self.round_of("ours", 2.2), yardsticks)


def test_a_round_goes_there_and_back() -> None:
    machine = Machine()
    machine.ratios()
    assert machine.calls[:6] == ["ours", "copy", "contiguous", "contiguous", "copy", "ours"]


def test_a_steady_drift_cancels_within_a_round() -> None:
    ratios = Machine(drift=1e-3).ratios()
    assert np.ptp(ratios["copy"]) < 1e-5 * 2.2
    assert abs(median(ratios["copy"]) - 2.2) < 1e-5


def test_a_quiet_machine_needs_the_fewest_rounds() -> None:
    assert {len(found) for found in Machine(noise=0.002).ratios().values()} == {DEVICE.fewest}


def test_a_noisy_machine_gets_more_rounds_but_not_for_ever() -> None:
    few, many = (len(Machine(noise=noise).ratios()["copy"]) for noise in (0.01, 0.5))
    assert DEVICE.fewest <= few < many == DEVICE.most


def test_every_yardstick_has_as_many_rounds() -> None:
    lengths = [len(found) for found in Machine(noise=0.05).ratios().values()]
    assert all(a == b for a, b in itertools.pairwise(lengths))
