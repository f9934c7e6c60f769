"""The latency gate's statistics on synthetic timings whose effect is known."""

import numpy as np
import pytest
from tiers import tier

from harness.gate.findings import GateVerdict
from harness.gate.settings import default_settings, effect

ROUNDS, TRIALS, NOISE = 40, tier(60, 400), 0.02


def verdicts(slowdown: float, noise: float, seed: int, trials: int = TRIALS) -> list[GateVerdict]:
    """Verdicts of trials in which the kernel really is slower by `slowdown` and each round has `noise`.

    Rounds are log-normal around the truth, with a heavy tail: one in twenty is disturbed by ten times the noise.
    """
    rng = np.random.default_rng(seed)

    def rounds(level: float) -> list[float]:
        spread = noise * rng.standard_normal(ROUNDS)
        spread += (rng.random(ROUNDS) < 0.05) * np.abs(10 * noise * rng.standard_normal(ROUNDS))
        return list(level * np.exp(spread))

    margins = default_settings().latency
    return [effect(rounds(1.3 * (1 + slowdown)), rounds(1.3)).verdict(margins) for _ in range(trials)]


def share(found: list[GateVerdict], verdict: GateVerdict) -> float:
    return found.count(verdict) / len(found)


@pytest.mark.nightly
def test_false_alarms_are_rarer_than_one_in_a_hundred_without_an_effect() -> None:
    found = verdicts(0.0, NOISE, seed=1)
    assert share(found, GateVerdict.regressed) < 0.01
    assert share(found, GateVerdict.passed) > 0.95


@pytest.mark.nightly
def test_no_false_alarm_even_where_the_noise_is_high() -> None:
    assert share(verdicts(0.0, 0.10, seed=2), GateVerdict.regressed) < 0.01


@pytest.mark.nightly
def test_five_percent_slower_is_found_at_two_percent_noise() -> None:
    found = verdicts(0.05, NOISE, seed=3)
    assert share(found, GateVerdict.regressed) >= 0.95
    assert share(found, GateVerdict.passed) <= 0.01


@pytest.mark.nightly
def test_too_much_noise_is_inconclusive_and_no_guess() -> None:
    found = verdicts(0.0, 0.20, seed=4, trials=tier(30, 100))
    assert share(found, GateVerdict.inconclusive) >= 0.95


def test_a_large_regression_is_found_through_much_noise() -> None:
    assert share(verdicts(1.0, 0.20, seed=5, trials=tier(30, 100)), GateVerdict.regressed) >= 0.95


def test_a_faster_kernel_passes() -> None:
    assert share(verdicts(-0.10, NOISE, seed=6, trials=tier(30, 100)), GateVerdict.passed) == 1.0


def test_bounds_hold_the_true_ratio_about_as_often_as_they_claim() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    trials = tier(80, 200)
    for _ in range(trials):
        found = effect(
            list(np.exp(0.02 * rng.standard_normal(40))), list(np.exp(0.02 * rng.standard_normal(40)))
        )
        hits += found.lower <= 1.0 <= found.upper
    assert hits >= 0.95 * trials


def test_rounds_without_any_spread_are_compared_exactly() -> None:
    found = effect([1.1] * 10, [1.0] * 10)
    assert (found.lower, found.upper) == pytest.approx((1.1, 1.1))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_round_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not a positive number"):
        effect([1.0] * 9 + [bad], [1.0] * 10)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="10 are the fewest"):
        effect([1.0] * 9, [1.0] * 40)
