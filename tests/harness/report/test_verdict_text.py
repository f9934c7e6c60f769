"""The verdict in words, on the console and on the page."""

import pytest
from synthetic_store import write_point

from harness.report import verdict_lines

POINT = {"cache.policy": "paged", "cache.block_size": 16}


def row(error, spread=0.01, metric="ttft_p50"):
    sides = {"analytic": None, "simulated": 1.0 + error, "measured": 1.0, "low": 0.99, "high": 1.01}
    return {"metric": metric, "unit": "s", **sides, "error": error, "spread": spread}


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([row(0.02)], "Yes: all 1 headline metrics are within 10 %"),
        ([row(0.5)], "No: 0 of 1 headline metrics"),
        ([row(0.5), row(0.01, metric="tpot_p50")], "Partly: 1 of 2 headline metrics"),
        ([row(0.5, spread=0.6)], "Yes"),
    ],
)
def test_the_answer_follows_from_errors_and_spreads(tmp_path, rows, start):
    write_point(tmp_path, POINT, comparison=rows)
    assert any(line.startswith(start) for line in verdict_lines(tmp_path))


def test_a_metric_line_sets_the_error_beside_the_spread(tmp_path):
    write_point(tmp_path, POINT, comparison=[row(-0.034, spread=0.012)])
    write_point(tmp_path, POINT | {"cache.block_size": 8}, comparison=[row(-0.03, spread=0.012)])
    assert verdict_lines(tmp_path)[-1] == (
        "TTFT p50: median error 3.2 %, worst −3.4 % at cache.block_size=16; "
        "spread of repeats 1.2 %; close at 2 of 2"
    )


def test_a_single_point_is_not_called_the_worst(tmp_path):
    write_point(tmp_path, POINT, comparison=[row(-0.134, spread=0.012)])
    assert verdict_lines(tmp_path)[-1] == "TTFT p50: error −13.4 %; spread of repeats 1.2 %; not close"


def test_no_point_is_blamed_for_an_error_of_nothing(tmp_path):
    for size in (8, 16):
        write_point(tmp_path, POINT | {"cache.block_size": size}, comparison=[row(0.0)])
    assert "worst 0.0 %; spread" in verdict_lines(tmp_path)[-1]


UNSCALED = {"n": 9, "mape": 0.3, "bias": -0.3, "total_error": -0.25}


def test_the_pace_of_the_device_is_said_with_what_following_it_was_worth(tmp_path):
    for size, ratio in ((8, 1.2), (16, 1.4)):
        pace = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "probes": 4, "unscaled": UNSCALED}
        levels = {"teacher_forced": {"n": 9, "mape": 0.05, "bias": 0.0, "total_error": 0.0}}
        write_point(tmp_path, POINT | {"cache.block_size": size}, pace=pace, levels=levels)
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Pace")]
    assert line == (
        "Pace: during the runs the device took 1.30 times as long as at calibration (probes from 1.10 to 1.50, "
        "2 points), and the prediction was scaled by it; mean error of a step's time 5.0 % with it, 30.0 % without."
    )


@pytest.mark.parametrize("pace", [None, {}])
def test_nothing_is_said_of_a_pace_that_was_not_followed(tmp_path, pace):
    write_point(tmp_path, POINT, pace=pace)
    assert not any(line.startswith("Pace") for line in verdict_lines(tmp_path))


def test_a_pace_without_its_worth_is_said_alone(tmp_path):
    write_point(tmp_path, POINT, pace={"ratio": 1.5})
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Pace")]
    assert line.endswith("(probes from 1.50 to 1.50, 1 point), and the prediction was scaled by it.")


def test_counts_and_audit_are_reported(tmp_path):
    write_point(tmp_path, POINT)
    lines = verdict_lines(tmp_path)
    assert any(line.startswith("Counts identical at 1 of 1 points") for line in lines)
    assert any("10 times, no mismatch" in line for line in lines)


def test_an_audit_mismatch_is_a_no(tmp_path):
    write_point(tmp_path, POINT, audit={"checks": 10, "mismatches": 2})
    lines = verdict_lines(tmp_path)
    assert lines[1].startswith("No:")
    assert any("2 mismatches" in line for line in lines)
