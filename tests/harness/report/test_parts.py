"""Axes, numbers and time bins: the small decisions behind the figures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.metrics import METRICS
from harness.metrics.log import SLOT_STATES
from harness.metrics.record import PointRecord
from harness.report import numbers
from harness.report.axes import _with_raw, alike, find_axes, reference
from harness.report.figures.curves import FacetLayout, _series
from harness.report.figures.memory import _bin
from harness.report.figures.series import axis_scale
from harness.report.page import _cost_section
from harness.report.provenance import (
    attribution_table,
    cautions,
    facts_table,
    headline,
    heldout_table,
    trace_line,
)
from harness.report.study import Study, spread
from harness.report.tables import points_table


def point(**settings):
    config = {"out": "x", "cache": {"policy": "paged", "block_size": 16}, "model": {"name": "m", "layers": 4}}
    for key, value in settings.items():
        group, leaf = key.split("__")
        config[group] = config.get(group, {}) | {leaf: value}
    return PointRecord(config=config, fingerprint=str(settings))


def test_axes_are_what_varies_within_a_policy():
    records = [point(cache__block_size=8), point(cache__block_size=16)]
    records.append(point(cache__policy="contiguous_max", cache__block_size=1, cache__prefix_caching=False))
    assert find_axes(records).values == {"cache.block_size": (8, 16)}


def test_what_a_named_choice_brings_is_no_axis():
    records = [point(model__name="a", model__layers=2), point(model__name="b", model__layers=2)]
    records.append(point(model__name="c", model__layers=8))
    assert list(find_axes(records).values) == ["model.name"]


def test_axes_stand_in_the_order_of_the_overrides():
    records = [point(cache__block_size=b, cache__pool_tokens=p) for b in (8, 16) for p in (100, 200)]
    first = replace(records[0], overrides=["cache.pool_tokens=100", "cache.block_size=8"])
    assert list(find_axes([first, *records[1:]]).values) == ["cache.pool_tokens", "cache.block_size"]


def test_unset_values_sort_behind_numbers():
    records = [point(workload__rate=rate) for rate in (None, 20.0, 3)]
    assert find_axes(records).values["workload.rate"] == (3, 20.0, None)


def test_reference_is_nearest_to_the_middle_even_in_a_grid_with_holes():
    records = [
        point(cache__block_size=b, cache__pool_tokens=p) for b, p in ((8, 1), (16, 1), (32, 3), (16, 2))
    ]
    axes = find_axes(records)
    assert reference(records, axes, "middle") is records[3]
    assert reference(records, axes, "low") is records[0]


def test_alike_frees_one_axis_only():
    records = [point(cache__block_size=b, cache__pool_tokens=p) for b in (8, 16) for p in (1, 2)]
    found = alike(records, records[0], find_axes(records), free=["cache.block_size"])
    assert found == [records[0], records[2]]


def test_values_that_are_spread_keep_the_ends():
    assert spread(range(10), 4) == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ttft_p50", 0.01234, "12.3 ms"),
        ("ttft_p50", 0.0, "0 s"),
        ("norm_latency_mean", 0.0023, "2.3 ms/token"),
        ("internal_share", 0.1234, "12.3 %"),
        ("peak_kv", 1536.0, "1.5 KiB"),
        ("output_throughput", 12345.6, "12,346 tokens/s"),
        ("steps", 150.0, "150 steps"),
        ("tail_waste", 0.5, "0.5 slots"),
        ("ttft_p50", None, "–"),
    ],
)
def test_figures_read_as_people_write_them(name, value, words):
    assert numbers.figure(METRICS[name], value) == words


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("ttft_p50", -0.034, "−3.4 %"), ("internal_share", 0.02, "+2.0 pts"), ("ttft_p50", -1e-6, "0.0 %")],
)
def test_errors_carry_sign_and_scale(name, value, words):
    assert numbers.error(METRICS[name], value) == words


def test_time_bins_weight_steps_by_their_overlap_and_leave_idle_time_out():
    steps = {state: [0.0, 0.0] for state in SLOT_STATES} | {"token": [100.0, 50.0], "free": [0.0, 50.0]}
    table = pd.DataFrame(steps | {"start_s": [0.0, 150.5], "seconds": [100.5, 49.5]})
    binned = _bin(table, 200.0)
    assert binned["token"].iloc[0] == pytest.approx(100.0)
    assert np.isnan(binned["token"].iloc[72])
    assert binned["token"].iloc[-1] == pytest.approx(50.0)
    assert binned["free"].iloc[-1] == pytest.approx(50.0)


def test_steps_of_replicas_that_run_at_once_count_each_for_its_time():
    steps = pd.DataFrame(dict.fromkeys(SLOT_STATES, 0), index=range(3))
    steps[["start_s", "seconds"]] = [(0.0, 10.0), (1.0, 1.0), (8.0, 4.0)]
    steps[["token", "free"]] = [(80, 20), (0, 100), (20, 80)]
    table = _bin(steps, 12.0)
    found = table.set_index("time_s")["token"]
    for at, share in ((0.5, 80.0), (1.5, 40.0), (5.0, 80.0), (9.0, 50.0), (11.0, 20.0)):
        assert np.interp(at, found.index, found) == pytest.approx(share, abs=1e-6)


def test_rows_that_were_kept_are_not_said_to_be_left_out():
    trace = {"dropped": {}, "noted": {"ties": 32}}
    assert trace_line([replace(point(), trace=trace)]) == (
        "no row was left out (kept: ties (noted): 32 rows), and nothing was changed"
    )
    said = trace_line([replace(point(), trace=trace | {"dropped": {"no output": 2}})])
    assert said.startswith("left out: no output (dropped): 2 rows (kept: ties")


def test_medians_of_levels_over_points_are_not_said_to_add_up():
    def of(kernel, rest):
        error = {"kernel": kernel, "rest_of_step": rest, "divergence": 0.0}
        same = dict.fromkeys(error, 0.5)
        parts = {"error": error, "spread": same, "share": same, "total": kernel + rest}
        return replace(point(), levels={"attribution": {"tpot_mean": parts}})

    table = attribution_table([of(0.3, -0.3), of(0.2, -0.1), of(0.0, -0.2)])
    assert [table.rows[0][place] for place in (1, 4, 10)] == ["+20.0 %", "−20.0 %", "0.0 %"]
    table = attribution_table([of(0.3, -0.1), of(0.2, -0.3), of(0.0, 0.3)])
    assert [table.rows[0][place] for place in (1, 4, 10)] == ["+20.0 %", "−10.0 %", "+20.0 %"]
    assert table.title.endswith("medians over points, which do not add up")


@pytest.mark.parametrize(("busy", "span", "rate"), [(1.0, 15.0, 20.0), (0.2, 11.0, 300 / 11)])
def test_raw_times_are_those_of_the_clock_and_idle_time_is_not_stretched(busy, span, rate):
    def row(metric, unit, value):
        return {"metric": metric, "unit": unit, "measured": value}

    record = replace(
        point(), pace={"by": "yardstick", "ratio": 1.5}, comparison=[row("busy_share", "share", busy)]
    )
    rows = [row("span", "s", 10.0), row("request_throughput", "requests/s", 30.0), row("itl_p50", "s", 0.2)]
    assert [_with_raw(record, one)["raw"] for one in rows] == pytest.approx([span, rate, 0.3])


def test_held_out_error_of_the_cost_model_is_shown_once():
    errors = {"step": {"n": 120.0, "mape": 0.04, "bias": -0.01, "p95": 0.1, "max": 0.3}}
    table = heldout_table([PointRecord(cost={"name": "m", "heldout": errors})] * 2)
    assert table.rows == [("m", "whole step", "120", "4.0 %", "−1.0 %", "10.0 %", "30.0 %")]


def test_a_model_that_was_not_fitted_has_no_held_out_error():
    assert heldout_table([PointRecord(cost={"name": "datasheet", "heldout": {}})]) is None


def test_facts_that_differ_are_ranges_or_lists():
    records = [
        PointRecord(environment={"load": load, "host": host})
        for load, host in ((1.5, "a"), (0.5, "b"), (1.0, "a"))
    ]
    assert facts_table("environment", records).rows == [["load", "0.5 – 1.5"], ["host", "a · b"]]


def study_of(cost: str, **settings):
    record = replace(point(**settings), cost={"kind": cost})
    return Study(Path("s"), "s", "", (record,))


def test_a_prediction_from_a_fitted_device_is_not_called_a_datasheet_s():
    (fitted, *_) = cautions(study_of("roofline", device__fitted_from="a log"))
    assert "fitted to a log" in fitted
    assert "nothing of it was measured" in " ".join(cautions(study_of("roofline", device__fitted_from=None)))


def test_the_cost_of_a_fitted_device_is_not_called_unfitted():
    (fitted,), (plain,) = (
        _cost_section(study_of("roofline", device__fitted_from=log)).text for log in ("a log", None)
    )
    assert fitted == "The device was fitted to a log; its file has the errors of that fit."
    assert plain == "The cost model was not fitted, so it has no held-out error."


def test_a_prediction_for_several_devices_says_how_many():
    many = {"device__tensor_parallel": 4, "device__data_parallel": 2}
    assert ("predicted for", "8 x h100") in headline(study_of("roofline", device__name="h100", **many))
    assert ("predicted for", "h100") in headline(study_of("roofline", device__name="h100"))


def test_steps_that_are_not_scheduled_ahead_are_said_of_predicted_devices_alone():
    words = "A step is scheduled when the step before it has ended."
    assert words in " ".join(cautions(study_of("published", scheduler__async_scheduling=False)))
    assert words not in " ".join(cautions(study_of("published", scheduler__async_scheduling=True)))
    assert words not in " ".join(cautions(study_of("fitted", scheduler__async_scheduling=False)))


def oracle_cells(*sections):
    """The last column of the table of points whose records have these sections, and its title."""
    records = [
        replace(point(cache__block_size=8 + n), oracle=found or {}) for n, found in enumerate(sections)
    ]
    table = points_table(records, find_axes(records))
    return table.groups[-1][0], [row[-1] for row in table.rows]


def test_the_table_of_points_says_in_how_many_steps_vllm_decided_the_same():
    whole = {"version": "0.33.0", "steps": 61_071, "compared": 61_071}
    ended = {"version": "0.33.0", "steps": 900, "compared": 120, "stopped": "step 121: victim"}
    other = {"version": "0.33.0", "not_compared": "it has no swapping"}
    title, cells = oracle_cells(whole, ended, other, None)
    assert title == "same decisions as vLLM 0.33.0"
    assert cells == ["61,071 of 61,071", "120 of 900", "not compared", "–"]


def test_the_table_of_points_has_no_such_column_where_nothing_was_compared():
    title, _ = oracle_cells(None, None)
    assert "vLLM" not in title


@pytest.mark.parametrize(
    ("value", "shown"), [(0.99962, "1,000 ms"), (0.0123, "12.3 ms"), (1.0, "1 s"), (1234.5, "1,234 s")]
)
def test_seconds_are_never_shown_as_powers_of_ten(value: float, shown: str) -> None:
    assert numbers.seconds(value) == shown


@pytest.mark.parametrize("largest", [0.0, 0.5, 7.5])
def test_slots_are_no_seconds(largest):
    assert axis_scale("tail_waste", largest) == (1.0, "slots")


def test_a_setting_that_is_null_has_a_line_of_its_own():
    row = dict.fromkeys(("analytic", "measured", "low", "high", "spread", "error"))
    rows = [row | {"metric": "steps", "unit": "steps", "simulated": 1.0}]
    records = [
        replace(
            point(cache__block_size=size, scheduler__long_prefill_tokens=most),
            overrides=[f"cache.block_size={size}", f"scheduler.long_prefill_tokens={most}"],
            comparison=rows,
        )
        for size in (8, 16)
        for most in (None, 512)
    ]
    axes = find_axes(records)
    hue = "scheduler.long_prefill_tokens"
    assert axes.values[hue] == (512, None)
    lines = _series(records, axes, FacetLayout("cache.block_size", hue, None, ("steps",)))
    assert sorted(zip(lines["series"], lines["x"], strict=True)) == [
        *(("512", 8.0), ("512", 16.0)),
        *(("null", 8.0), ("null", 16.0)),
    ]
    columns = _series(records, axes, FacetLayout("cache.block_size", None, hue, ("steps",)))
    assert set(columns["column"]) == {"512", "null"}
