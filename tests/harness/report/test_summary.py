"""The Markdown summary, and what changed between two stores."""

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_store import write_point, write_store
from tiers import cases

from harness.cli.main import main
from harness.metrics import METRICS
from harness.report import ReportError
from harness.report.verdict_text import change_lines, changes, summary_markdown
from harness.store.manifest import read_manifest, write_manifest

POINTS = [{"cache.policy": "paged", "cache.block_size": size} for size in (8, 16, 32)]


def row(value: float, spread: float = 0.01, metric: str = "request_throughput") -> dict[str, object]:
    sides = {"analytic": None, "simulated": value, "measured": value, "low": value, "high": value}
    return {"metric": metric, "unit": METRICS[metric].unit, **sides, "error": 0.0, "spread": spread}


def store(folder: Path, value: float, spread: float = 0.01, metric: str = "request_throughput") -> Path:
    for point in POINTS:
        write_point(folder, point, comparison=[row(value, spread, metric)])
    return folder


def test_a_change_beyond_the_spread_is_counted_with_its_bounds(tmp_path: Path) -> None:
    text = "\n".join(change_lines(store(tmp_path / "new", 12.0), store(tmp_path / "old", 10.0)))
    assert "| request throughput | +20.0 % | +20.0 % to +20.0 % | 3 of 3 | measured |  |" in text
    assert "* request throughput +20.0 % at block size" in text


def test_a_change_over_measured_and_predicted_points_is_not_called_measured(tmp_path: Path) -> None:
    for name, value in (("new", 12.0), ("old", 10.0)):
        for size, measured in ((8, True), (16, False)):
            point = {"cache.policy": "paged", "cache.block_size": size}
            write_point(tmp_path / name, point, measure=measured, comparison=[row(value)])
    rows, _ = changes(tmp_path / "new", tmp_path / "old")
    assert [one.side for one in rows] == ["measured where it was"]


def test_a_change_within_the_spread_is_no_change(tmp_path: Path) -> None:
    text = "\n".join(change_lines(store(tmp_path / "new", 12.0, 0.5), store(tmp_path / "old", 10.0, 0.5)))
    assert "| 0 of 3 |" in text


def test_equal_stores_show_no_change(tmp_path: Path) -> None:
    same = store(tmp_path / "one", 10.0)
    assert "| 0.0 % | 0.0 % to 0.0 % | 0 of 3 |" in "\n".join(change_lines(same, same))


@cases(("now", "spread", "worse"), [(8.0, 0.01, True), (12.0, 0.01, False), (8.0, 0.5, False)], day=2)
def test_only_a_change_for_the_worse_beyond_the_spread_is_worse(tmp_path, now, spread, worse):
    rows, _ = changes(store(tmp_path / "new", now, spread), store(tmp_path / "old", 10.0, spread))
    assert [one.worse for one in rows] == [worse]


@pytest.mark.parametrize(
    ("now", "before", "spread", "worse"), [(0.0, 0.5, 0.0, True), (0.4, 0.42, 0.03, False), (0.9, 0.92, 0.001, True)]
)  # fmt: skip
def test_a_share_changes_by_points_also_from_and_to_nothing(tmp_path, now, before, spread, worse):
    folders = [(tmp_path / name, value) for name, value in (("new", now), ("old", before))]
    (one,), _ = changes(*(store(folder, value, spread, "hit_ratio") for folder, value in folders))
    assert (one.clear, one.worse) == (3 * worse, worse)


def test_a_report_on_two_stores_shows_what_changed_and_ends_with_one_if_it_is_worse(tmp_path: Path) -> None:
    new, old = store(tmp_path / "new", 8.0), store(tmp_path / "old", 10.0)
    assert main(["report", str(new), str(old), "--figures", "none"]) == 1
    page = (new / "report" / "index.html").read_text()
    assert "Worse beyond doubt: request throughput." in page
    assert main(["report", str(old), str(new), "--figures", "none"]) == 0


def test_stores_without_a_common_point_are_refused(tmp_path: Path) -> None:
    write_point(tmp_path / "other", {"cache.policy": "paged", "cache.block_size": 64})
    with pytest.raises(ReportError, match="no point in common"):
        change_lines(store(tmp_path / "new", 1.0), tmp_path / "other")


def test_the_summary_begins_with_the_verdict_and_holds_the_answers(tmp_path: Path) -> None:
    text = summary_markdown(write_store(tmp_path, POINTS))
    assert text.startswith("## PageTwin: synthetic")
    assert text.index("Can the prediction be trusted?") < text.index("Which block size is best?")


def test_what_two_stores_differ_in_beside_their_points_is_named(tmp_path: Path) -> None:
    """They are matched by what was swept. All else may differ, and the change is then none of the code."""
    points = [
        {**point, "device.name": "h200", "device.tflops": 989.5, "workload.num_requests": 9}
        for point in POINTS
    ]
    for folder, those in (("new", points), ("old", POINTS)):
        write_store(tmp_path / folder, those)
        manifest = read_manifest(tmp_path / folder)
        swept = [replace(one, overrides=one.overrides[:2]) for one in manifest.points]
        write_manifest(tmp_path / folder, replace(manifest, points=tuple(swept)))
    said = "\n".join(change_lines(tmp_path / "new", tmp_path / "old"))
    wanted = "3 of 3 points have the settings of a point of"
    assert f"{wanted} {tmp_path / 'old'}, but for device.name, workload.num_requests." in said
    assert f"{wanted} {tmp_path / 'old'}." in "\n".join(change_lines(tmp_path / "old", tmp_path / "old"))


def test_another_trace_under_the_same_settings_is_named(tmp_path: Path) -> None:
    for folder, digest in (("new", "a"), ("old", "b")):
        for point in POINTS:
            write_point(tmp_path / folder, point, comparison=[row(1.0)], trace={"digest": digest})
    assert "but for the requests of the trace." in "\n".join(change_lines(tmp_path / "new", tmp_path / "old"))


def test_a_measured_point_is_not_set_against_a_predicted_one(tmp_path: Path) -> None:
    new, old = store(tmp_path / "new", 20.0), tmp_path / "old"
    for point in POINTS:
        write_point(old, point, measure=False, comparison=[row(10.0) | {"measured": None}])
    rows, said = changes(new, old)
    assert rows == []
    assert "3 points of them measured in one store alone: not compared." in said[0]
    assert not any("throughput" in line for line in said)
