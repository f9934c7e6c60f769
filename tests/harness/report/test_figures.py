"""What the figures hold: every point, baselines that can be told apart, and warnings where they are read."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic_store import grid, write_point, write_store
from tiers import cases

from harness.metrics.record import PointRecord
from harness.report.axes import find_axes
from harness.report.figures import curves, errors, memory
from harness.report.figures.series import policies, policy_line, value_axis
from harness.report.study import read_study
from harness.report.style import MOST_DRAWN_MARKS, STATE_COLOURS, Drawing, new_figure, style, svg_bytes

ONE = {"cache.policy": "paged", "workload.prefix_share": 0.0, "decoding.beam_width": 1}
UNPRICED = {
    "kind": "roofline",
    "provenance": {"not priced": "block size: attention takes as long at any block size"},
}
BASELINES = ("paged", "contiguous_max", "contiguous_pow2", "contiguous_oracle")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return read_study(write_store(tmp_path_factory.mktemp("curves"), grid(policies=BASELINES)))


def drawing(study, key):
    axes = find_axes(study.records)
    with style():
        found = curves.draw(study, axes, curves.layout_of(axes, key))
    assert isinstance(found, Drawing)
    return found


@pytest.fixture(scope="module")
def curve(study):
    """Drawing takes seconds; nobody changes it."""
    return drawing(study, "cache.block_size")


@cases("key", ["cache.block_size", "workload.prefix_share", "decoding.beam_width"], day=1)
def test_every_paged_point_is_in_the_curves_along_each_setting(study, curve, key):
    found = curve if key == "cache.block_size" else drawing(study, key)
    paged = found.data[found.data["cache.policy"] == "paged"]
    assert paged["point"].nunique() == 27
    assert "all of its 27 points" in found.caption


def test_no_two_baselines_look_alike_in_the_curves(study, curve):
    looks = [tuple(policy_line(name).values()) for name in policies(study.records)]
    for part in zip(*looks, strict=True):
        assert len({str(value) for value in part}) == len(BASELINES)
    labels = [text.get_text() for text in curve.figure.legends[0].get_texts()]
    assert set(BASELINES[1:]) <= set(labels)


def test_a_baseline_without_blocks_stands_beside_every_block_size(study):
    layout = curves.FacetLayout("workload.prefix_share", None, "cache.block_size", ("request_throughput",))
    with style():
        found = curves.draw(study, find_axes(study.records), layout)
    assert "Dashed: contiguous_max, contiguous_oracle, contiguous_pow2" in found.caption
    assert len(found.figure.axes) == 3
    for panel in found.figure.axes:
        colours = {line.get_color() for line in panel.lines if len(line.get_xdata()) > 1}
        assert {policy_line(name)["color"] for name in BASELINES[1:]} <= colours


@pytest.mark.parametrize("absent", ["hit_ratio", "tail_waste"])
def test_block_sizes_without_a_prefix_cache_or_without_decoding_are_drawn_by_what_is_known(study, absent):
    known = [
        replace(record, comparison=[row for row in record.comparison if row["metric"] != absent])
        for record in study.records[:3]
    ]
    with style():
        found = memory.draw_waste(replace(study, records=tuple(known)), find_axes(study.records))
    assert len(found.figure.axes) == 1
    assert ("Hit ratio" in found.caption) is (absent == "tail_waste")


def test_attention_is_compared_at_equal_load(study):
    with style():
        found = curves.draw_kernel(study, find_axes(study.records))
    assert {"kv_slots", "seconds"} <= set(found.data.columns)
    paged = found.data[(found.data["layout"] == "16") & (found.data["side"] == "predicted")]
    per_slot = paged["seconds"] / paged["kv_slots"]
    row = next(row for row in study.records[9].comparison if row["metric"] == "attention_per_kv_token")
    assert per_slot.min() <= row["simulated"] <= per_slot.max()


@cases("priced", [True, False], day=1)
def test_a_figure_along_block_sizes_says_that_the_cost_model_does_not_price_them(
    tmp_path: Path, priced: bool
):
    for size in (8, 16):
        changes = {} if priced else {"cost": UNPRICED}
        write_point(tmp_path, ONE | {"cache.block_size": size}, **changes)
    study = read_study(tmp_path)
    axes = find_axes(study.records)
    with style():
        found = [
            curves.draw(study, axes, curves.layout_of(axes, "cache.block_size")),
            curves.draw_kernel(study, axes),
        ]
    said = ["does not price block size" in one.figure.get_supxlabel() for one in found]
    assert said == [not priced] * 2


@pytest.mark.nightly
def test_a_figure_along_block_sizes_says_that_they_are_priced_by_a_model(tmp_path: Path):
    said = {"what": "static model of our Triton decode kernel, not measured", "uncertainty": 0.18}
    for size in (8, 16):
        cost = {"kind": "roofline", "provenance": {"not priced": "", "block size": said}}
        write_point(tmp_path, ONE | {"cache.block_size": size}, cost=cost)
    study = read_study(tmp_path)
    axes = find_axes(study.records)
    with style():
        found = curves.draw(study, axes, curves.layout_of(axes, "cache.block_size"))
    assert "static model of our kernels, not by measurements" in found.figure.get_supxlabel()
    assert "below 18% are no finding" in found.figure.get_supxlabel()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Three settings, one of them with twelve values."""
    shares = tuple(place / 12 for place in range(12))
    axes = {"cache.block_size": (8, 16), "workload.prefix_share": shares, "decoding.beam_width": (1, 2)}
    return read_study(write_store(tmp_path_factory.mktemp("wide"), grid(axes)))


@pytest.mark.nightly
def test_a_setting_with_many_values_gives_four_columns_with_every_policy(wide):
    found = drawing(wide, "decoding.beam_width")
    assert len(found.figure.axes) == 4 * len(curves.SHOWN)
    assert set(found.data["cache.policy"]) == {"paged", "contiguous_max"}


def test_labels_along_a_logarithmic_axis_keep_apart(study):
    panel = new_figure(3, 2).subplots()
    value_axis(panel, "decoding.beam_width", [1, 2, 3, 4, 5, 6, 7, 8])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "2", "3", "5", "8"]


@pytest.mark.parametrize(("marks", "pictures"), [(MOST_DRAWN_MARKS, 0), (MOST_DRAWN_MARKS + 1, 1)])
def test_very_many_marks_become_a_picture_and_text_stays_text(marks, pictures):
    figure = new_figure(3, 2)
    panel = figure.subplots()
    panel.scatter(range(marks), range(marks))
    panel.set_xlabel("words")
    svg = svg_bytes(figure, "many").decode()
    assert svg.count("<image") == pictures
    assert ">words</text>" in svg


def grouped_points(study) -> list[PointRecord]:
    """Paged points with match units of their own and a hit ratio; the last had no prompt that could hit."""
    paged = [record for record in study.records if record.policy == "paged"]
    for number, record in enumerate(paged):
        pool = {**record.pool, "groups": {"match_unit": 16 << number % 3, "pages": "uniform"}}
        others = [row for row in record.comparison if row["metric"] != "hit_ratio"]
        found = {"metric": "hit_ratio", "unit": "", "simulated": 0.25}
        rows = [*others, found] if number + 1 < len(paged) else others
        paged[number] = replace(record, pool=pool, comparison=rows)
    return paged


def test_hits_against_the_match_unit_leave_out_a_point_without_them(study):
    paged = grouped_points(study)
    with style():
        drawn = memory.draw_hits(replace(study, records=paged), find_axes(paged))
    assert isinstance(drawn, Drawing)
    assert sorted(drawn.data["match_unit"].unique()) == [16, 32, 64]
    assert drawn.data["point"].nunique() == len(paged) - 1


def test_the_point_that_finds_most_is_that_of_all_and_not_of_the_bars(study):
    paged = [record for record in study.records if record.policy == "paged"]
    for number, record in enumerate(paged):  # of 27 points 16 have a bar, the second has none
        hits = {"hit_ratio": 0.5 if number == 1 else 0.1, "optimal_hit_ratio": 0.9}
        rows = [{"metric": name, "unit": "", "simulated": value} for name, value in hits.items()]
        paged[number] = replace(record, simulated=hits, comparison=rows)
    with style():
        drawn = memory.draw_hits(replace(study, records=paged), find_axes(paged))
    assert f"{paged[1].point_label} finds most: 50 %" in drawn.caption
    assert drawn.caption.endswith(" Shown: 16 of 27 points, spread evenly.")


def test_the_axis_of_errors_is_linear_where_no_error_is_large(tmp_path):
    sides = {"analytic": None, "simulated": 0.59, "measured": 1.0, "low": 0.99, "high": 1.01}
    row = {"metric": "ttft_p50", "unit": "s", **sides, "error": -0.41, "spread": 0.01}
    write_point(tmp_path, ONE, comparison=[row])
    study = read_study(tmp_path)
    with style():
        found = errors.draw_errors(study, find_axes(study.records))
    (panel,) = found.figure.axes
    assert panel.get_xscale() == "linear"
    assert "logarithmic" not in panel.get_xlabel() + found.caption


def test_the_axis_of_errors_has_ticks_where_it_is_logarithmic_and_says_so(tmp_path):
    sides = {"analytic": None, "simulated": 0.7, "measured": 1.0, "low": 0.99, "high": 1.01}
    row = {"metric": "ttft_p50", "unit": "s", **sides, "error": -0.7, "spread": 0.01}
    write_point(tmp_path, ONE, comparison=[row])
    wide = read_study(tmp_path)
    with style():
        found = errors.draw_errors(wide, find_axes(wide.records))
    (panel,) = found.figure.axes
    assert {-100.0, -50.0, -30.0, 50.0} <= set(panel.get_xticks())
    assert "logarithmic beyond ±20" in panel.get_xlabel()


@pytest.mark.nightly
def test_a_logarithmic_scale_has_plain_numbers(study):
    with style():
        found = errors.draw_agreement(study, find_axes(study.records))
        assert isinstance(found, Drawing)
        assert "log" in {panel.get_xscale() for panel in found.figure.axes}
        assert b"mathdefault" not in svg_bytes(found.figure, "a")


def test_states_that_touch_in_a_stack_differ_in_grey():
    def lightness(colour):
        red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    greys = [lightness(colour) for colour in STATE_COLOURS.values()]
    assert min(abs(one - other) for one, other in pairwise(greys)) > 0.1
