"""The verdict in words, on the console and on the page."""

import json

import pytest
from synthetic_store import grid, write_point, write_store

from engine.core.options import Eviction
from harness.report import verdict_lines
from harness.report.study import read_study
from harness.report.verdict_text import changes, console_lines, summary_markdown

POINT = {"cache.policy": "paged", "cache.block_size": 16}


def row(error, spread=0.01, metric="ttft_p50"):
    sides = {"analytic": None, "simulated": 1.0 + error, "measured": 1.0, "low": 0.99, "high": 1.01}
    return {"metric": metric, "unit": "s", **sides, "error": error, "spread": spread}


def runs_of(rows):
    """Three runs of each metric that lie closely together; they fit `row(...)`."""
    return {"runs": [{one["metric"]: value for one in rows} for value in (0.999, 1.0, 1.001)]}


TIMES = ("request_throughput", "tpot_p50", "ttft_p50")


def said(tmp_path, errors):
    rows = [row(error, 0.001, metric=name) for name, error in zip(TIMES, errors, strict=True)]
    write_point(tmp_path, POINT, comparison=rows, measured=runs_of(rows))
    return next(line for line in verdict_lines(tmp_path) if line.startswith(("Yes", "No", "Partly")))


@pytest.mark.parametrize(
    ("errors", "start"),
    [
        ((0.0, 0.0, 0.0), "Yes: trusted: counts, throughput, time per output token, time to first token"),
        (
            (0.0, 0.1, 0.0),
            "Yes, within limits: trusted: counts, throughput, time to first token; trusted within a",
        ),
        (
            (0.0, 0.0, 0.6),
            "Partly: trusted: counts, throughput, time per output token; not trusted: time to first",
        ),
        (
            (0.6, 0.7, 0.8),
            "No: trusted: counts; not trusted: throughput, time per output token, time to first",
        ),
    ],
)
def test_the_answer_follows_from_the_verdicts_of_the_classes(tmp_path, errors, start):
    assert said(tmp_path, errors).startswith(start)


def test_a_limit_is_said_as_a_number(tmp_path):
    assert "time per output token (within 10.1 % at nine of ten points)" in said(tmp_path, (0.0, 0.1, 0.0))


def test_a_class_is_described_by_its_errors_and_the_noise(tmp_path):
    said(tmp_path, (0.0, 0.0, 0.6))
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Time to first token")]
    assert (
        line
        == "Time to first token: not trusted (TTFT p50: typical error 60.0 %, noise floor 0.1 %, worst +60.0 %)."
    )


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


def test_the_verdict_says_that_times_were_corrected_and_the_raw_error(tmp_path):
    pace = {"ratio": 1.2, "low": 1.1, "high": 1.3, "probes": 4, "unscaled": UNSCALED}
    levels = {"teacher_forced": {"n": 9, "mape": 0.05, "bias": 0.0, "total_error": 0.0}}
    rows = [row(0.0, 0.001, metric=name) for name in TIMES]
    write_point(tmp_path, POINT, pace=pace, levels=levels, comparison=rows, measured=runs_of(rows))
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Yes")]
    assert line.endswith(
        "after correcting for the machine's pace; raw, the error of a step's time is 30.0 %."
    )


def test_a_point_of_the_older_rule_stands_at_the_share_that_it_reached(tmp_path):
    folder = write_point(tmp_path, POINT | {"workload.prefix_share": 0.75})
    record = json.loads((folder / "record.json").read_text())
    change = "0.75 of each prompt comes from one of 8 shared prefixes (Zipf exponent 1), the rest is unique"
    record["trace"] |= {"changes": [change], "realised_prefix_share": 0.4512}
    (folder / "record.json").write_text(json.dumps(record))
    assert any(
        f"{change}. So 45 % of the prompt tokens are shared" in line for line in verdict_lines(tmp_path)
    )
    assert read_study(tmp_path).records[0].setting("workload.prefix_share") == 0.45


def with_config(tmp_path, **groups):
    """A point whose configuration has these values."""
    folder = write_point(tmp_path, POINT)
    record = json.loads((folder / "record.json").read_text())
    for group, values in groups.items():
        record["config"][group].update(values)
    (folder / "record.json").write_text(json.dumps(record))
    return verdict_lines(tmp_path)


def test_a_fitted_device_without_its_engines_settings_is_said(tmp_path):
    lines = with_config(tmp_path, device={"fitted_from": "shop, first 75 of 300 requests"})
    assert any(
        "has no settings of that engine: scheduler.max_running, scheduler.max_batched_tokens, cache.pool_tokens are"
        in line
        for line in lines
    )


def test_groups_that_keep_more_than_vllm_are_said(tmp_path):
    lines = with_config(
        tmp_path, cache={"groups": "uniform", "prefix_caching": True, "retention_interval": None}
    )
    assert any("documents asked twice hit 0.458 here and 0.000 there" in line for line in lines)


def test_groups_that_keep_what_vllm_keeps_need_no_word(tmp_path):
    lines = with_config(
        tmp_path, cache={"groups": "uniform", "prefix_caching": True, "retention_interval": 0}
    )
    assert not any("documents asked twice" in line for line in lines)


@pytest.mark.parametrize(
    ("cache", "rules", "said"),
    [
        ({"eviction": "gdsf"}, None, ["gdsf"]),
        ({"eviction": "gdsf"}, {"eviction": 2}, []),
        ({"eviction": None, "keep": "ttl"}, None, ["ttl"]),
        ({"eviction": "priority"}, None, []),
        ({"eviction": "lru", "tier_eviction": "priority"}, None, []),
        ({"eviction": "lru", "tier_eviction": "priority", "tier_tokens": 64}, None, ["priority"]),
    ],
)
def test_a_rule_that_was_corrected_since_is_named_beside_its_figures(tmp_path, cache, rules, said):
    folder = write_point(tmp_path / "old", POINT)
    record = json.loads((folder / "record.json").read_text())
    record["config"]["cache"] |= cache
    record["pool"] |= {"rules": rules} if rules else {}
    (folder / "record.json").write_text(json.dumps(record))
    write_point(tmp_path / "new", POINT)
    for lines in (
        verdict_lines(tmp_path / "old"),
        summary_markdown(tmp_path / "old").splitlines(),
        changes(tmp_path / "new", tmp_path / "old")[1],
    ):
        assert [
            rule for rule in Eviction if any(f"an earlier rule of {rule}," in line for line in lines)
        ] == said


@pytest.mark.parametrize("pace", [None, {}])
def test_nothing_is_said_of_a_pace_that_was_not_followed(tmp_path, pace):
    write_point(tmp_path, POINT, pace=pace)
    assert not any(line.startswith("Pace") for line in verdict_lines(tmp_path))


def test_a_pace_without_its_worth_is_said_alone(tmp_path):
    write_point(tmp_path, POINT, pace={"ratio": 1.5})
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Pace")]
    assert line.endswith("(probes from 1.50 to 1.50, 1 point), and the prediction was scaled by it.")


def test_a_pace_that_the_yardstick_told_is_said_with_what_it_changed(tmp_path):
    pace = {"by": "yardstick", "ratio": 1.2, "low": 0.9, "high": 1.6, "probes": 90, "unscaled": UNSCALED}
    write_point(tmp_path, POINT, pace=pace, levels={"teacher_forced": {"mape": 0.05}})
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Pace")]
    assert "took 1.20 times as long as at calibration (a yardstick between the steps: 0.90 to 1.60" in line
    assert (
        "Measured times are divided by the pace beside them; mean error of a step's time 5.0 % with it"
        in line
    )


def test_without_a_calibration_the_pace_is_not_said_to_be_relative_to_one(tmp_path):
    since = {"since": "first warm-up of the process"}
    write_point(tmp_path, POINT, pace={"by": "yardstick", "ratio": 1.2, "low": 0.9, "high": 1.6, **since})
    (line,) = [line for line in verdict_lines(tmp_path) if line.startswith("Pace")]
    assert "1.20 times as long as at the first warm-up of the process (" in line
    assert "calibration" not in line


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


def test_the_console_says_what_to_choose_and_how_far_to_trust_it_a_line_each(tmp_path):
    axes = {"cache.block_size": (8, 16), "decoding.beam_width": (1, 2)}
    lines = console_lines(read_study(write_store(tmp_path, grid(axes))))
    assert [line.partition(":")[0] for line in lines[:4]] == [
        "Everything finished", "Cache", "Block size", "Cost of beam width"
    ]  # fmt: skip
    assert "Typical errors: memory" in lines[4]
    assert len(lines) == 5


def test_a_console_whose_counts_differ_names_the_difference(tmp_path):
    counts = {"identical": False, "steps": 9, "first_difference": "step 3: block ids"}
    write_point(tmp_path, POINT, levels={"counts": counts})
    lines = console_lines(read_study(tmp_path))
    assert any(line.startswith("No: the two sides did different work") for line in lines)
    assert any("step 3: block ids" in line for line in lines)
