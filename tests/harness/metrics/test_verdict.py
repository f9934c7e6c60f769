"""A sweep: what is close, what is worst, and what makes a verdict void."""

import pytest

from harness.metrics.record import PointRecord, compare
from harness.metrics.verdict import Trust, judge, median_interval


def record(name, simulated=1.0, runs=(1.0,), **changes):
    measured = [{"ttft_p50": value} for value in runs]
    base = {
        "fingerprint": name,
        "overrides": [f"workload.seed={name}"],
        "outcome": {"simulated": {"finished": 4, "rejected": 0, "unfinished": 0}, "dropped": 0},
        "measured": {"runs": measured},
        "comparison": compare({}, {"ttft_p50": simulated}, measured),
        "levels": {"counts": {"identical": True, "steps": 9, "first_difference": None}},
        "audit": {"checks": 3, "mismatches": 0},
    }
    return PointRecord(**base | changes)


def test_worst_and_median_error_over_the_points():
    verdict = judge([record("a", 1.01), record("b", 1.05), record("c", 0.8)]).metrics[0]
    assert verdict.median_error == pytest.approx(0.05)
    assert verdict.worst_error == pytest.approx(-0.2)
    assert verdict.worst_point == "workload.seed=c"


def test_small_errors_and_errors_within_the_noise_are_trusted():
    near = [record(name, 1.01, (0.999, 1.0, 1.001)) for name in "abcd"]
    noisy = [record(name, 1.085, (0.9, 1.0, 1.12)) for name in "abcdefghijkl"]
    far = [record(name, 1.1, (0.999, 1.0, 1.001)) for name in "abcd"]
    lost = [record(name, 1.4, (0.999, 1.0, 1.001)) for name in "abcd"]
    found = [judge(records).metrics[0].trust for records in (near, noisy, far, lost)]
    assert found == [Trust.trusted, Trust.trusted, Trust.within, Trust.not_trusted]


def test_one_point_far_off_keeps_a_class_from_being_trusted():
    records = [record(name, 1.01, (0.999, 1.0, 1.001)) for name in "abcdefghijk"]
    one_off = judge([*records, record("z", 1.5, (0.999, 1.0, 1.001))]).metrics[0]
    assert judge(records).metrics[0].trust is Trust.trusted
    assert one_off.trust is not Trust.trusted
    assert one_off.worst_point == "workload.seed=z"


def test_noise_without_end_is_no_excuse():
    records = [record(name, 2.0, (0.5, 1.0, 3.0)) for name in "abcd"]
    assert judge(records).metrics[0].trust is Trust.not_trusted


def test_one_run_of_one_point_is_not_tested():
    assert judge([record("a")]).metrics[0].trust is Trust.untested


def test_differing_counts_are_a_verdict_of_their_own():
    counts = {"identical": False, "steps": 9, "first_difference": "step 3: rows"}
    found = judge([record("a", levels={"counts": counts})]).classes
    assert (found[0].name, found[0].trust) == ("counts", Trust.not_trusted)


def test_spread_of_repeats_stands_beside_the_error():
    verdict = judge([record("a", 1.0, (0.9, 1.0, 1.3)), record("b", 1.0, (1.0, 1.0, 1.1))]).metrics[0]
    assert verdict.worst_spread == pytest.approx(0.3)


def test_simulation_only_points_are_counted_but_not_judged():
    verdict = judge([record("a"), record("b", measured={}, comparison=[], levels={}, audit={})])
    assert (verdict.points, verdict.measured) == (2, 1)
    assert verdict.metrics[0].points == 1


def test_differing_counts_are_named_and_make_it_unsound():
    counts = {"identical": False, "steps": 9, "first_difference": "step 3: rows"}
    verdict = judge([record("a"), record("b", levels={"counts": counts})])
    assert verdict.different == {"workload.seed=b": "step 3: rows"}
    assert not verdict.sound


def test_an_audit_mismatch_makes_it_unsound():
    verdict = judge([record("a", audit={"checks": 5, "mismatches": 1}), record("b")])
    assert (verdict.audit_checks, verdict.audit_mismatches) == (8, 1)
    assert not verdict.sound


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"simulated": {"finished": 3, "rejected": 1, "unfinished": 0}}, "simulated: 1 rejected"),
        ({"measured": {"finished": 3, "rejected": 0, "unfinished": 2}}, "measured: 2 unfinished"),
        ({"dropped": 5}, "5 dropped before the replay"),
        ({"dropped": {"longer than the model": 2, "larger than the pool": 1}}, "3 dropped before the replay"),
    ],
)
def test_anything_but_all_finished_is_named(outcome, words):
    assert judge([record("a", outcome=outcome)]).unfinished == {"workload.seed=a": words}


def test_no_records_give_an_empty_verdict():
    verdict = judge([])
    assert (verdict.points, verdict.metrics) == (0, ())


def test_interval_of_a_median_covers_it_and_repeats():
    values = [0.01, 0.02, 0.03, 0.05, 0.4]
    low, high = median_interval(values)
    assert low <= 0.03 <= high
    assert median_interval(values) == (low, high)


def test_two_points_have_no_interval():
    assert median_interval([0.1, 0.2]) is None


def test_equal_points_have_an_interval_of_no_width():
    assert median_interval([0.1] * 4) == (0.1, 0.1)
