"""A sweep that is too large to be shown whole: a grid of its values is shown, and all points are in the tables."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from shutil import copytree

import pandas as pd
import pyarrow.parquet as pq
import pytest
from synthetic_store import grid, write_store
from tiers import tier

from harness.cli import report as command
from harness.config.errors import UserError
from harness.config.schema import Figures, ReportConfig
from harness.metrics import METRICS
from harness.report import study, verdict_lines, write
from harness.report.axes import VALUES, comparison_table, find_axes
from harness.report.study import EveryRecord, asked_points, read_study, shown_points, spread
from harness.store.commit import Layout, read_store
from harness.store.manifest import read_manifest
from harness.store.summary import write_summary
from harness.workers import in_workers

SMALL = {"cache.block_size": (8, 16, 32), "workload.prefix_share": (0.0, 0.5), "decoding.beam_width": (1, 2)}


def asked(**counts: int) -> dict[str, tuple[str, ...]]:
    axes = [[f"{key}={value}" for value in range(count)] for key, count in counts.items()]
    return {str(number): words for number, words in enumerate(product(*axes))}


def test_a_small_sweep_is_shown_whole() -> None:
    points = asked(a=10, b=20)
    assert shown_points(points, 200, 50) == list(points)


@pytest.mark.parametrize("counts", [{"a": 100, "b": 10, "c": 5}, {"a": 3000}, {"a": 2, "b": 2, "c": 2000}])
def test_no_more_points_are_shown_than_allowed(counts: dict[str, int]) -> None:
    assert 50 < len(shown_points(asked(**counts), 200, 100)) <= 100


def test_every_shown_point_has_its_neighbours_along_each_setting() -> None:
    points = asked(a=40, b=10, c=5)
    shown = [points[name] for name in shown_points(points, 200, 100)]
    assert len(shown) == len(list(product(*({words[place] for words in shown} for place in range(3)))))


def test_the_first_and_the_last_value_of_each_setting_stay() -> None:
    points = asked(a=40, b=10, c=5)
    shown = [points[name] for name in shown_points(points, 200, 100)]
    assert {("a=0", "b=0", "c=0"), ("a=39", "b=9", "c=4")} <= set(shown)


def test_values_are_spread_evenly() -> None:
    assert spread(list(range(11)), 3) == [0, 5, 10]


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """Stores of more than 13 points count as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "MOST_WHOLE", 13)
        patch.setattr(study, "MOST_SHOWN", 13)
        patch.setattr(command, "MOST_AT_ONCE", 13)
        yield


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory, few: None) -> Path:
    """A large store with its report."""
    root = write_store(tmp_path_factory.mktemp("large"), grid(SMALL))
    manifest = read_manifest(root)
    assert manifest is not None
    command.write_report(root, manifest, options=ReportConfig(figures=Figures.none))
    return root


@pytest.mark.nightly
def test_the_page_says_how_many_points_it_shows_and_where_all_are(reported: Path) -> None:
    text = (reported / "report" / "index.html").read_text()
    assert "Shown are 12 of 16 points" in text
    assert "figures/points_wide.csv" in text


def test_the_table_of_points_has_the_figures_of_all_points_that_a_small_report_has(
    reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "MOST_WHOLE", 1000)
    records = read_study(reported).records
    sides = [side for side in VALUES if side != "raw"]  # which follows from the columns of the pace
    table = comparison_table(records, find_axes(records)).set_index(["point", "metric"])[sides]
    small = {(*key, side): value for key, row in table.iterrows() for side, value in row.dropna().items()}
    wide = pd.read_csv(reported / "report" / "figures" / "points_wide.csv", index_col="point")
    found = {
        (point, *((name, "simulated") if name in METRICS else name.rsplit(".", 1))): value
        for name in wide.columns[list(wide.columns).index("ttft_mean") :]
        for point, value in wide[name].dropna().items()
    }
    assert found == small


def test_points_of_an_asked_value_are_shown_beside_the_grid(reported: Path) -> None:
    """`report --x … --where KEY=VALUE` refused a value that the grid leaves out."""
    manifest = read_manifest(reported)
    assert manifest is not None
    shown = {record.fingerprint for record in read_study(reported).records}
    left = next(point.overrides[0] for point in manifest.points if point.fingerprint not in shown)
    held = {point.fingerprint for point in manifest.points if left in point.overrides}
    assert not held <= shown
    assert held | shown == {record.fingerprint for record in read_study(reported, where=[left]).records}


def test_the_table_of_points_begins_with_the_settings_of_each(reported: Path) -> None:
    wide = pd.read_csv(reported / "report" / "figures" / "points_wide.csv")
    assert set(wide["cache.block_size"]) >= {8, 16, 32}
    assert list(wide.columns[:2]) == ["point", "cache.policy"]


@pytest.mark.nightly
def test_a_table_with_a_line_for_each_figure_of_an_earlier_smaller_report_goes(
    reported: Path, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    copytree(reported, root)
    (root / "report" / "figures" / "points.csv").write_text("an earlier one")
    command.write_report(root, read_manifest(root), options=ReportConfig(figures=Figures.none))
    assert not (root / "report" / "figures" / "points.csv").exists()


def test_the_summary_has_all_points(reported: Path) -> None:
    assert pq.read_table(Layout(reported).summary).num_rows == 16


def test_the_summary_is_that_of_whole_records(reported: Path, tmp_path: Path) -> None:
    names = [point.fingerprint for point in read_manifest(reported).points]  # type: ignore[union-attr]
    whole = write_summary(tmp_path, map(read_store(reported).records.__getitem__, names))
    assert pq.read_table(Layout(reported).summary).equals(pq.read_table(whole))


def test_a_damaged_record_that_is_not_shown_is_named(reported: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    copytree(reported, root)
    shown = {record.fingerprint for record in read_study(root).records}
    other = next(p.fingerprint for p in read_manifest(root).points if p.fingerprint not in shown)  # type: ignore[union-attr]
    Layout(root).record(other).write_text("{")
    found = read_study(root, shown_only=True)
    every = EveryRecord(root, asked_points(found))
    assert len(list(every)) == 15
    corrected = every.corrected(found)
    assert f"{other}/record.json" in corrected.problems[0]
    assert (corrected.total, corrected.absent) == (15, 1)


def test_parts_that_are_read_in_several_processes_give_the_same_files(
    reported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By day the parts are read in this process: it shows that they are cut rightly."""
    monkeypatch.setattr(write, "_PART", 3)
    monkeypatch.setattr(write.os, "cpu_count", lambda: 2)
    started: list[int] = []
    monkeypatch.setattr(
        write,
        "in_workers",
        lambda function, parts, count: started.append(count) or in_workers(function, parts, tier(1, count)),
    )
    copy = tmp_path / "copy"  # the report is noted in the manifest of its store
    copytree(reported, copy)
    command.write_report(
        copy, read_manifest(copy), target=tmp_path, options=ReportConfig(figures=Figures.none)
    )
    assert started == [2]
    points = "figures/points_wide.csv"
    assert (tmp_path / points).read_bytes() == (reported / "report" / points).read_bytes()
    assert pq.read_table(tmp_path / "summary.parquet").equals(pq.read_table(Layout(reported).summary))


def test_many_points_without_a_manifest_are_refused(
    reported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "copy"
    copytree(reported, root)
    Layout(root).manifest.unlink()
    monkeypatch.setattr(command, "MOST_UNNAMED", 15)
    with pytest.raises(UserError, match=r"holds 16 points and no sweep\.json"):
        command.write_report(root, None)


def test_a_verdict_without_a_report_before_it_counts_all_points(reported: Path) -> None:
    assert any("16 points" in line for line in verdict_lines(reported))
