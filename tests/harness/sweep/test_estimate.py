"""How long a sweep takes is learned from earlier points; where there are none, nothing is guessed."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.config.checks import value_of
from harness.config.schema import ReplayConfig, RunConfig, WorkloadConfig
from harness.metrics.record import PointRecord
from harness.store.commit import essentials
from harness.sweep.progress import Span, _kind, fitted, time_model

POLICY = {"cache": {"policy": "paged"}, "decoding": {"beam_width": 1}, "cost": {"kind": "auto"}}
KIND = {**POLICY, "model": {"name": "tiny-llama", "path": None}, "device": {"name": "cpu"}}


def record(
    seconds: float | None, requests: int, *, measure: bool = False, repeats: int = 3, **sections: Any
) -> PointRecord:
    return PointRecord(
        config={**KIND, "measure": measure, "replay": {"repeats": repeats}, **sections},
        trace={"requests": requests},
        seconds={"point": seconds} if seconds is not None else {},
    )


def point(requests: int, *, measure: bool = False, repeats: int = 3) -> Any:
    config = RunConfig(
        measure=measure, workload=WorkloadConfig(num_requests=requests), replay=ReplayConfig(repeats=repeats)
    )
    return SimpleNamespace(config=config)


def expected(span: Span | None) -> float:
    assert span is not None
    return span.seconds


def test_time_is_proportional_to_requests_and_divided_among_workers() -> None:
    times = time_model([record(2.0, 100), record(3.0, 100), record(4.0, 100)])
    assert expected(times.duration([point(1000), point(1000)], workers=2)) == pytest.approx(30.0)


def test_measured_points_run_alone_and_count_their_runs() -> None:
    times = time_model([record(8.0, 100, measure=True, repeats=3)])
    assert expected(times.duration([point(100, measure=True, repeats=1)], workers=8)) == pytest.approx(4.0)


def test_a_kind_of_point_that_never_ran_is_not_guessed() -> None:
    times = time_model([record(2.0, 100)])
    assert times.duration([point(100), point(100, measure=True)], workers=1) is None


def test_records_without_seconds_do_not_count() -> None:
    assert time_model([record(None, 100), record(1.0, 0)]).points == 0


def test_points_of_the_same_kind_are_learned_from_first() -> None:
    other = [record(50.0, 100, model={"name": "other"}) for _ in range(5)]
    times = time_model([*other, record(2.0, 100), record(2.0, 100)])
    assert expected(times.duration([point(100)], workers=1)) == pytest.approx(2.0)


def test_points_of_other_kinds_count_where_there_are_none_of_the_same() -> None:
    times = time_model([record(5.0, 100, model={"name": "other"})])
    assert expected(times.duration([point(100)], workers=1)) == pytest.approx(5.0)


def test_a_fixed_part_of_each_point_is_told_from_that_of_its_requests() -> None:
    fit = fitted([(10.0, 1.1), (100.0, 2.0), (1000.0, 11.0)])
    assert (fit.fixed, fit.each) == (pytest.approx(1.0), pytest.approx(0.01))


def test_points_that_are_not_slower_when_they_are_larger_have_one_time() -> None:
    fit = fitted([(10.0, 2.1), (100.0, 2.0), (1000.0, 1.9)])
    assert (fit.fixed, fit.each) == (pytest.approx(2.0), 0.0)


def test_a_point_has_the_seconds_of_its_own_kind() -> None:
    times = time_model([record(50.0, 100, model={"name": "other"}), record(2.0, 100)])
    assert times.seconds(point(200).config) == pytest.approx(4.0)


def test_a_planned_point_is_of_the_same_kind_as_its_record() -> None:
    config = RunConfig(measure=False)
    kept = essentials(PointRecord(config=asdict(config)))
    assert _kind(partial(value_of, config)) == _kind(kept.setting)


def test_a_single_point_says_nothing_of_the_error() -> None:
    span = time_model([record(2.0, 100)]).duration([point(100)], workers=1)
    assert span == Span(pytest.approx(2.0), None, None)


def test_the_interval_holds_the_time_as_often_as_it_says() -> None:
    draws, held = np.random.default_rng(0), 0
    for _ in range(300):
        took = draws.normal(1.0, 0.2, 40)
        earlier = [record(float(seconds), 100) for seconds in took[:10]]
        span = time_model(earlier).duration([point(100)] * 30, workers=1)
        assert span is not None
        assert span.low is not None
        assert span.high is not None
        held += span.low <= took[10:].sum() <= span.high
    assert 0.91 < held / 300 < 0.99
