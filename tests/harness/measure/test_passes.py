"""Tests of the passes of a calibration, on runs whose seconds are planted."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.measure.cases import Budget, CalibrationCase
from harness.measure.passes import MOST_PASSES, Passes

CASES = [CalibrationCase("short", 2, (4, 8), (4, 8), 1.0), CalibrationCase("long", 4, (4, 8), (4, 8), 1.0)]


def test_passes_tell_by_how_much_the_level_of_all_cases_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = iter(
        np.repeat([9.0, 1.0, 1.1, 0.9], len(CASES))
    )  # the first pass meets new shapes, and does not count

    def run(case: CalibrationCase, **_: object) -> SimpleNamespace:
        steps = {"seconds": np.full(3, case.requests * next(pace))}
        return SimpleNamespace(log=SimpleNamespace(steps=steps), recording=SimpleNamespace(step_ns=()))

    for name, value in (
        ("measure", run),
        ("case_point", lambda _, case, __: case),
        ("probe_s", lambda _: 1.0),
        ("pace_of_runs", lambda _: SimpleNamespace(ratio=1.0)),
    ):
        monkeypatch.setattr(f"harness.measure.passes.{name}", value)
    reference = (1.0, 1.0, 1.0)
    passes = Passes(None, CASES, 1.0, lambda _: None, Budget(None), reference)  # type: ignore[arg-type]
    passes.measure()
    assert MOST_PASSES == 4
    assert passes.levels == pytest.approx([1.0, 1.1, 0.9])
