"""What a reader finds on the page, and in which order, for stores of every kind."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
from synthetic_store import grid, write_failure, write_point, write_store

from harness.config.schema import Figures, ReportConfig
from harness.metrics.record import PointRecord
from harness.report import ReportError, verdict_lines, write_report
from harness.report.study import read_study
from harness.report.style import Missing
from harness.report.write import FIGURES
from harness.store.commit import commit_point

ONE = {
    "cache.policy": "paged",
    "cache.block_size": 16,
    "workload.prefix_share": 0.0,
    "decoding.beam_width": 1,
}
TWO = ONE | {"cache.block_size": 32}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def words_of(store: Path) -> str:
    """The page of a report on `store` without its figures, which take most of the time."""
    return text_of(write_report(store, options=ReportConfig(figures=Figures.none)))


def test_sections_stand_in_the_order_of_the_readers_questions(page):
    found = re.findall(r'<section id="([a-z]+)">', text_of(page))
    assert found == [
        "answers", "trust", "explore", "memory", "run", "tables",
    ]  # fmt: skip


def test_the_places_that_the_guide_names_for_twelve_questions_exist(page):
    guide = (Path(__file__).parents[3] / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = guide.partition("## Twelve questions")[2].partition("\n## ")[0].splitlines()
    rows = [row for row in rows if row.startswith("|") and "`#" in row]
    assert len(rows) == 12
    anchors = {name for row in rows for name in re.findall(r"`#(\w+(?:-\w+)*)`", row)}
    assert {name for name in anchors if f'id="{name}"' not in text_of(page)} == set()


def test_load_trace_and_command_are_said_before_the_first_section_ends(page):
    brief = re.search(r'<p class="soft" id="brief">(.*?)</p>', text_of(page), re.DOTALL)[1]
    assert re.match(r"Load: Requests queued at .* Trace: .*what was run.* Again: <code>", brief, re.DOTALL)


def test_every_swept_axis_has_its_curves(page):
    text = text_of(page)
    for axis in ("cache_block_size", "workload_prefix_share", "decoding_beam_width"):
        assert f'id="figure-curve_{axis}"' in text


def test_markup_in_a_name_is_shown_and_not_obeyed(page):
    text = text_of(page)
    assert "<h1>&lt;fragmentation&gt;</h1>" in text
    assert "<fragmentation>" not in text


def test_page_needs_nothing_from_outside(page):
    text = text_of(page)
    assert not re.findall(r"<(?:img|iframe|object)\b|<script[^>]*src", text)
    assert not re.findall(r"\b(?:fetch|XMLHttpRequest|import)\(", text)
    assert set(re.findall(r'<link[^>]*href="([^"]+)"', text)) == {"data:,"}
    assert len(text.encode()) < 3_000_000


def test_ids_of_inline_figures_are_unique(page):
    ids = re.findall(r'\bid="([^"]+)"', text_of(page))
    assert len(ids) == len(set(ids))


def test_text_in_figures_stays_text(page):
    text = text_of(page)
    assert "predicted = measured" in text
    assert text.count("<text") > 200


@pytest.mark.nightly
def test_every_figure_is_written_for_print_with_its_data(page):
    folder = page.parent / "figures"
    names = {path.stem for path in folder.glob("*.svg")}
    assert {"errors", "agreement", "memory", "pool_over_time", "kernel", "levels"} <= names
    for name in names:
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert len((folder / f"{name}.csv").read_text().splitlines()) > 1


def test_figures_have_paper_column_width(page):
    svg = (page.parent / "figures" / "agreement.svg").read_text()
    width_pt = float(re.search(r'<svg[^>]*\bwidth="([\d.]+)pt"', svg)[1])
    assert width_pt == pytest.approx(7.16 * 72, abs=0.1)


def test_links_of_the_page_lead_to_files(page):
    links = set(re.findall(r'<a href="([^"]+)"', text_of(page)))
    inside = {link[1:] for link in links if link.startswith("#")}
    assert inside <= set(re.findall(r'\bid="([^"]+)"', text_of(page)))
    files = {link for link in links if not link.startswith("#")}
    assert inside
    assert files
    assert all((page.parent / link).is_file() for link in files)


@pytest.mark.nightly
def test_equal_stores_give_equal_bytes(tmp_path):
    store = write_store(tmp_path / "store", [ONE], measure=False)
    page, again = (write_report(store, out=tmp_path / name) for name in ("one", "other"))
    for path in sorted(page.parent.rglob("*.*")):
        assert (again.parent / path.relative_to(page.parent)).read_bytes() == path.read_bytes(), path.name


def test_the_command_that_makes_it_again_is_shown(page):
    assert "<code>python -m harness sweep name=&lt;fragmentation&gt;</code>" in text_of(page)


def test_all_metrics_of_all_points_are_in_one_csv(page):
    lines = (page.parent / "figures" / "points.csv").read_text().splitlines()
    records = [json.loads(path.read_text()) for path in page.parents[1].glob("points/*/record.json")]
    assert len(lines) == 1 + sum(len(record["comparison"]) for record in records)


def test_every_change_of_the_trace_is_named(page):
    assert "50% of the prompt tokens are shared. (6 of 12 points)" in text_of(page)


def test_a_single_point_says_that_nothing_was_swept(tmp_path):
    text = words_of(write_store(tmp_path, [ONE]))
    assert "No numeric setting was swept" in text
    assert "Only one allocator was run (paged)" in text
    assert "Everything finished: 1 point" in text


def draw_alone(monkeypatch, *names):
    """Leave every figure but these out of the reports of a test."""
    rest = {name: lambda *_, name=name: Missing(name, "left out") for name in FIGURES if name not in names}
    monkeypatch.setattr("harness.report.write.FIGURES", {**FIGURES, **rest})


@pytest.mark.nightly
def test_simulation_only_says_why_there_is_no_measured_side(tmp_path, monkeypatch):
    draw_alone(monkeypatch, "errors", "agreement", "levels")
    text = text_of(write_report(write_store(tmp_path, [ONE, TWO], measure=False)))
    assert "Simulation only: nothing was measured" in text
    assert text.count("No point was measured (measure=false)") == 3


def test_a_mixture_judges_the_measured_points(tmp_path):
    write_point(tmp_path, ONE)
    write_point(tmp_path, TWO, measure=False)
    text = words_of(tmp_path)
    assert "1 of 1" in text
    assert "All 2 points" in text


def test_points_of_several_models_are_told_apart(tmp_path):
    points = [{**point, "model.name": name} for point in (ONE, TWO) for name in ("small", "large")]
    text = words_of(write_store(tmp_path, points))
    assert "model large" in text


@pytest.mark.nightly
def test_a_crowded_sweep_folds_its_table(tmp_path):
    axes = {
        "cache.block_size": (4, 8, 16),
        "workload.request_rate": tuple(float(rate) for rate in range(1, 21)),
    }
    text = words_of(write_store(tmp_path, grid(axes, ("paged",)), measure=False))
    assert "<summary>All 60 points</summary>" in text


def test_no_trace_of_where_the_store_lies(page):
    assert str(page.parents[1]) not in text_of(page)


def test_an_empty_store_says_what_to_do(tmp_path):
    with pytest.raises(ReportError, match=r"no points in .*: run 'python -m harness sweep out="):
        write_report(tmp_path)


def test_only_failures_give_a_report_that_is_loud(tmp_path):
    write_failure(tmp_path, ONE, "pool <too> small")
    text = words_of(tmp_path)
    assert "1 point FAILED" in text
    assert "pool &lt;too&gt; small" in text
    assert "No point has a record, so there is nothing to judge." in text
    assert re.search(r"points/[0-9a-f]+/failure.json", text)


def test_failures_beside_points_come_first(tmp_path):
    write_point(tmp_path, ONE)
    write_failure(tmp_path, TWO)
    lines = verdict_lines(tmp_path)
    assert lines[0].startswith("1 point FAILED, first cache.block_size=32")


def test_a_half_written_record_is_named_and_skipped(tmp_path):
    write_point(tmp_path, ONE)
    broken = write_point(tmp_path, TWO) / "record.json"
    broken.write_text(broken.read_text()[:100])
    text = words_of(tmp_path)
    assert "NOT readable" in text
    assert f"{broken.parent.name}/record.json: truncated" in text


def test_points_that_did_not_run_yet_are_counted(tmp_path):
    store = write_store(tmp_path, [ONE, TWO])
    next(store.glob("points/*/record.json")).unlink()
    assert verdict_lines(store)[0].startswith("1 point NOT run yet")


def test_points_of_another_sweep_are_left_out_and_counted(tmp_path):
    store = write_store(tmp_path, [ONE])
    write_point(store, TWO)
    text = words_of(store)
    assert "1 more points in this store belong to another sweep" in text
    assert "Points that failed" not in text
    assert "Everything finished: 1 point," in text


def test_dropped_requests_are_the_first_line(tmp_path):
    finished = {"finished": 20, "rejected": 0, "unfinished": 0}
    write_point(tmp_path, ONE, outcome={"simulated": finished, "measured": finished, "dropped": 4})
    assert verdict_lines(tmp_path)[0].endswith("4 dropped before the replay")


def test_differing_counts_void_the_verdict(tmp_path):
    counts = {"identical": False, "steps": 9, "first_difference": "step 3: block ids"}
    write_point(tmp_path, ONE, levels={"counts": counts})
    text = words_of(tmp_path)
    assert "No: the two sides did different work" in text
    assert "step 3: block ids" in text


def test_a_missing_step_table_costs_one_figure(tmp_path, monkeypatch):
    draw_alone(monkeypatch, "pool_over_time")
    folder = write_point(tmp_path, ONE)
    (folder / "steps.parquet").unlink()
    assert "has a readable step table" in text_of(write_report(tmp_path))


def test_a_folder_that_cannot_be_written_is_named(store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write the report to"):
        write_report(store, out=tmp_path / "file", options=ReportConfig(figures=Figures.none))


def test_pace_and_the_date_of_calibration_stand_where_a_reader_looks_for_them(tmp_path):
    cost = {"kind": "fitted", "name": "x", "provenance": {"started": 1795233682.5, "device": "Synthetic CPU"}}
    pace = {"ratio": 1.25, "low": 1.1, "high": 1.3, "probes": 4, "unscaled": {"mape": 0.3}}
    write_point(tmp_path, ONE, cost=cost, pace=pace)
    text = words_of(tmp_path)
    trust, environment = text.partition('id="trust"')[2], text.partition('id="environment"')[2]
    assert "the device took 1.25 times as long as at calibration" in trust.partition("</section>")[0]
    assert "Pace of the device" in environment.partition("</details>")[0]
    assert "2026-11-21 04:01+00:00" in text


def test_the_head_says_at_which_pace_measured_seconds_are_stated(tmp_path):
    pace = {"by": "yardstick", "ratio": 1.25, "low": 1.1, "high": 1.3, "probes": 4, "unscaled": {"mape": 0.3}}
    write_point(tmp_path, ONE, pace=pace)
    assert "at the pace of the calibration" in words_of(tmp_path).partition('id="trust"')[0]


def test_a_date_that_is_text_already_stays(tmp_path):
    write_point(tmp_path, ONE, cost={"kind": "fitted", "provenance": {"started": "2026-01-01T00:00"}})
    assert "2026-01-01T00:00" in words_of(tmp_path)


@pytest.mark.nightly
def test_points_are_told_apart_where_no_sweep_says_how(tmp_path):
    write_point(tmp_path, ONE)
    write_point(tmp_path, TWO)
    text = text_of(write_report(tmp_path))
    assert "cache.block_size=32" in text
    assert "cache.policy=paged" not in text


def test_a_report_that_cannot_be_written_leaves_the_one_that_is_there(tmp_path, monkeypatch):
    write_point(tmp_path, ONE)
    page = write_report(tmp_path, options=ReportConfig(figures=Figures.none))
    before = {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()}
    write_point(tmp_path, TWO)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("harness.store.atomic._write", full)
    with pytest.raises(ReportError, match=r"cannot write the report to .*: No space left"):
        write_report(tmp_path, options=ReportConfig(figures=Figures.none))
    assert {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()} == before


@pytest.mark.nightly
def test_curves_of_an_earlier_report_go_and_other_files_stay(tmp_path):
    write_point(tmp_path, ONE)
    write_point(tmp_path, TWO)
    figures = write_report(tmp_path).parent / "figures"
    assert (figures / "curve_cache_block_size.svg").exists()
    (figures / "mine.svg").touch()
    shutil.rmtree(next(tmp_path.glob("points/*")))
    write_report(tmp_path)
    assert not (figures / "curve_cache_block_size.svg").exists()
    assert (figures / "mine.svg").exists()


def test_a_record_that_does_not_say_on_which_cache_it_ran_is_named_and_left_out(tmp_path):
    write_point(tmp_path, ONE)
    commit_point(tmp_path, "a" * 32, PointRecord(config={"measure": False}), {})
    study = read_study(tmp_path)
    assert len(study.records) == 1
    assert "its cache's policy and block size are missing" in study.problems[0]
