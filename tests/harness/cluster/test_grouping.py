"""Points are shared out among jobs by cost: few jobs, about equally long."""

from pathlib import Path

import fake_point
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.job import groups_of
from harness.sweep.plan import PlannedPoint, plan_sweep, sweep_request
from harness.sweep.progress import TimeFit, TimeModel, work_of

UNKNOWN = TimeModel({}, 0)


def each(seconds: float) -> TimeModel:
    """A time model of so many seconds a request."""
    return TimeModel({(False,): TimeFit(0.0, seconds, None, 1, 1)}, 1)


def points(*overrides: str) -> list[PlannedPoint]:
    request = sweep_request(["measure=false", "trace.name=any", f"out={Path('nowhere')}", *overrides])
    return list(plan_sweep(request, fake_point).points)


SEEDS = points("workload.seed=range(60)")
SIZES = points("workload.num_requests=" + ",".join(str(10 * number) for number in range(1, 31)))


def test_a_thousand_small_points_are_not_a_thousand_jobs() -> None:
    assert len(groups_of(SEEDS, UNKNOWN, 32, 60.0)) == 32


def test_known_short_points_fill_one_job() -> None:
    times = each(0.5 / work_of(SEEDS[0].config))  # half a second a point
    assert len(groups_of(SEEDS, times, 32, 60.0)) == 1
    assert len(groups_of(SEEDS, times, 32, 10.0)) == 3


def test_known_long_points_get_a_job_each_up_to_the_most() -> None:
    times = each(100.0)
    assert [len(group) for group in groups_of(SEEDS[:5], times, 32, 60.0)] == [1] * 5


def test_no_points_make_no_group() -> None:
    assert groups_of([], UNKNOWN, 32, 60.0) == []


@given(st.integers(1, 40), st.booleans(), st.floats(0, 1e4))
def test_every_point_is_in_exactly_one_group_and_none_is_empty(
    jobs: int, known: bool, shortest: float
) -> None:
    groups = groups_of(SIZES, each(0.1) if known else UNKNOWN, jobs, shortest)
    names = [point.fingerprint for group in groups for point in group]
    assert sorted(names) == sorted(point.fingerprint for point in SIZES)
    assert all(groups)
    assert len(groups) <= jobs


@given(st.integers(1, 40))
def test_no_group_costs_more_than_the_mean_and_one_point_together(jobs: int) -> None:
    groups = groups_of(SIZES, UNKNOWN, jobs, 0.0)
    costs = [sum(work_of(point.config) for point in group) for group in groups]
    assert max(costs) <= sum(costs) / len(costs) + max(work_of(point.config) for point in SIZES)


def test_points_keep_their_order_in_a_group() -> None:
    (group,) = groups_of(SIZES, UNKNOWN, 1, 0.0)
    assert list(group) == SIZES
