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
    assert verdict_lines(tmp_path)[-1] == (
        "TTFT p50: median error 3.4 %, worst −3.4 % at cache.policy=paged cache.block_size=16; "
        "spread of repeats 1.2 %; close at 1 of 1"
    )


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
