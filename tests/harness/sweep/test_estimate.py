"""How long a sweep takes is learned from earlier points; where there are none, nothing is guessed."""

from types import SimpleNamespace
from typing import Any

from harness.config.schema import ReplayConfig, RunConfig, WorkloadConfig
from harness.sweep.estimate import pace_of


def record(
    seconds: float | None, requests: int, *, measure: bool = False, repeats: int = 3
) -> dict[str, Any]:
    return {
        "config": {"measure": measure, "replay": {"repeats": repeats}},
        "trace": {"requests": requests},
        "seconds": {"point": seconds} if seconds is not None else {},
    }


def point(requests: int, *, measure: bool = False, repeats: int = 3) -> Any:
    config = RunConfig(
        measure=measure, workload=WorkloadConfig(num_requests=requests), replay=ReplayConfig(repeats=repeats)
    )
    return SimpleNamespace(config=config)


def test_time_is_proportional_to_requests_and_divided_among_workers() -> None:
    pace = pace_of([record(2.0, 100), record(3.0, 100), record(4.0, 100)])
    assert pace.duration_s([point(1000), point(1000)], workers=2) == 30.0


def test_measured_points_run_alone_and_count_their_runs() -> None:
    pace = pace_of([record(8.0, 100, measure=True, repeats=3)])
    assert pace.duration_s([point(100, measure=True, repeats=1)], workers=8) == 4.0


def test_a_kind_of_point_that_never_ran_is_not_guessed() -> None:
    pace = pace_of([record(2.0, 100)])
    assert pace.duration_s([point(100), point(100, measure=True)], workers=1) is None


def test_records_without_seconds_do_not_count() -> None:
    assert pace_of([record(None, 100), record(1.0, 0)]).points == 0
