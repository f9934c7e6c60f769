"""Figures and tables for papers: a panel a file, widths, letters, and LaTeX that holds what the CSV holds."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from synthetic_store import grid, write_store

from harness import point
from harness.cli.main import main
from harness.cli.report import options_of
from harness.config.schema import Paper, ReportConfig
from harness.metrics.verdict import judge
from harness.report import write, write_report
from harness.report.axes import find_axes
from harness.report.study import read_study
from harness.report.style import Drawing, latex_table, panel_files, panels, style, svg_bytes
from harness.report.tables import latex_files
from harness.sweep.plan import plan_sweep, run_request

TABLE = pd.DataFrame({"a_b": [1.0, None], "50 %": ["x & y", "#1 ~ {≤} \\"]})


def drawn(name: str = "two") -> Drawing:
    """Two panels, of which the first alone has an axis label of y, and the second a bar of colours; and a legend."""
    figure, (left, right) = panels(7.16, 2.4, 1, 2)
    left.plot([0, 1], [1, 2], label="predicted by a model with a long name")
    left.set_ylabel("requests")
    left.set_xlabel("rate")
    left.set_title("left")
    figure.colorbar(right.imshow([[0.0, 1.0]]), ax=right)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return Drawing(name, "A figure.", figure, TABLE)


@cache
def files_of(paper: Paper, *, serif: bool = False) -> dict[str, bytes]:
    with style(serif=serif):
        return panel_files(drawn(), paper)


@pytest.fixture(autouse=True)
def _no_pdf() -> None:
    """Here PDFs are looked at."""


def test_dollars_in_a_name_are_drawn_and_no_formula() -> None:
    with style():
        figure, (panel,) = panels(3.5, 2.4, 1, 1)
        panel.set_title(r"$\frac{$")
        assert rb"$\frac{$" in svg_bytes(figure, "name")


def svg_inches(svg: bytes) -> float:
    found = re.search(rb'<svg [^>]*width="([\d.]+)pt"', svg)
    assert found is not None
    return float(found[1]) / 72


def pdf_inches(pdf: bytes) -> float:
    found = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ", pdf)
    assert found is not None
    return float(found[1]) / 72


@pytest.mark.nightly
def test_every_panel_is_a_file_of_its_own() -> None:
    names = {
        f"two-{number}-{width}.{kind}"
        for number in (1, 2)
        for width in ("column", "page")
        for kind in ("svg", "pdf")
    }
    assert files_of(Paper.both).keys() == names
    assert files_of(Paper.none) == {}


@pytest.mark.nightly
def test_a_panel_is_as_wide_as_its_column() -> None:
    files = files_of(Paper.both)
    for width, inches in (("column", 3.33), ("page", 7.0)):
        assert svg_inches(files[f"two-1-{width}.svg"]) == pytest.approx(inches, abs=0.01)
        assert pdf_inches(files[f"two-2-{width}.pdf"]) == pytest.approx(inches, abs=0.01)


@pytest.mark.nightly
def test_letters_have_serifs_where_asked_and_are_in_the_file() -> None:
    plain, serif = files_of(Paper.column), files_of(Paper.column, serif=True)
    assert b"DejaVuSans" in plain["two-1-column.pdf"]
    assert b"STIXGeneral" in serif["two-1-column.pdf"]
    assert b"DejaVu" not in serif["two-1-column.pdf"]
    assert b"<text" not in serif["two-1-column.svg"]  # shapes: no program needs the font


@pytest.mark.nightly
def test_a_panel_gets_the_labels_that_its_neighbour_had_for_both() -> None:
    figure, grid = panels(7.16, 4.0, 2, 2)
    for panel, label in zip(grid, ("a", "b", "c", "d"), strict=True):
        panel.plot([0, 1])
        panel.set_label(label)
    grid[0].set_title("first column")
    grid[0].set_ylabel("upper row")
    grid[2].set_ylabel("lower row")
    grid[3].set_xlabel("right below")
    with style():
        panel_files(Drawing("four", "", figure, TABLE), Paper.column, pdf=False)
    assert [panel.get_ylabel() for panel in grid] == ["upper row", "upper row", "lower row", "lower row"]
    assert [panel.get_xlabel() for panel in grid] == ["", "right below", "", "right below"]
    assert [panel.get_title() for panel in grid] == ["first column", "", "first column", ""]


@pytest.mark.nightly
def test_a_bar_of_colours_stays_with_its_panel() -> None:
    files = files_of(Paper.column)
    assert b"axes_2" in files["two-2-column.svg"]
    assert b"axes_2" not in files["two-1-column.svg"]


def test_a_legend_is_as_narrow_as_the_column() -> None:
    figure, (panel,) = panels(7.16, 2.4, 1, 1)
    for number in range(4):
        panel.plot([0, number], label=f"a line with a name that is long {number}")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    with style():
        panel_files(Drawing("legend", "", figure, TABLE), Paper.column, pdf=False)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert len(legend.get_texts()) == 4


def test_latex_escapes_what_latex_takes_for_commands() -> None:
    text = latex_table([("", "a_b"), ("", "50 %")], [["x & y", "#1 ~"], ["{≤} \\", "–"]], 1).decode()
    assert "a\\_b & 50 \\% \\\\" in text
    assert "x \\& y" in text
    assert "\\#1 \\textasciitilde" in text
    assert "\\{$\\le$\\} \\textbackslash" in text
    assert "& --" in text


def test_latex_has_the_rules_of_booktabs_groups_over_their_columns_and_a_cell_for_each() -> None:
    head = [("", "block"), ("throughput (1/s)", "predicted"), ("throughput (1/s)", "measured")]
    text = latex_table(head, [["8", "1.2", "1.3"], ["16", "1.4", "1.5"]], 1).decode()
    assert text.startswith("% \\usepackage{booktabs}\n\\begin{tabular}{lrr}")
    assert "\\multicolumn{2}{c}{throughput (1/s)}" in text
    body = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0].splitlines()
    assert [row.count("&") for row in body] == [2, 2]


def test_a_table_of_a_paper_says_below_of_how_many_points_it_shows_twelve(tmp_path: Path) -> None:
    few = read_study(write_store(tmp_path, grid({"cache.block_size": (8, 16)}))).records
    whole, part = (
        latex_files(some, find_axes(few), judge(few))["points.tex"].decode() for some in (few, [*few] * 500)
    )
    assert "\\bottomrule\n\\end{tabular}" in whole
    assert re.search(
        r"\\bottomrule\n\\multicolumn\{\d+\}\{l\}\{12 of 1,500 points, spread evenly\} \\\\\n", part
    )


@pytest.mark.nightly
def test_the_table_of_a_paper_has_units_few_digits_and_twelve_rows(tmp_path: Path) -> None:
    axes = {
        "cache.block_size": (8, 16, 32),
        "workload.prefix_share": (0.0, 0.5, 0.9),
        "decoding.beam_width": (1, 2),
    }
    records = read_study(write_store(tmp_path, grid(axes))).records
    text = latex_files(records, find_axes(records), judge(records))["points.tex"].decode()
    rows = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0].splitlines()
    assert len(rows) == 12
    assert "(tokens/s)" in text
    assert not re.search(r"\d\.\d{4}", text)


@pytest.mark.nightly
def test_latex_compiles_the_tables(tmp_path: Path) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed (Debian: texlive-latex-base)")
    records = read_study(write_store(tmp_path / "store", grid())).records
    files = latex_files(records, find_axes(records), judge(records))
    body = "\n".join(text.decode() for text in files.values())
    rules = "".join(
        rf"\let\{name}rule\hline" for name in ("top", "mid", "bottom")
    )  # booktabs is another package
    paper = f"\\documentclass{{article}}{rules}\\begin{{document}}\\tiny\n{body}\n\\end{{document}}"
    (tmp_path / "paper.tex").write_text(paper)
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


# -- through the report ----------------------------------------------------------------------------------


@pytest.fixture
def one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report draws one figure alone: to draw all takes many seconds."""
    monkeypatch.setattr(write, "_pictures", lambda study, axes: [("two", drawn())])
    monkeypatch.setattr(write, "build_page", lambda *parts, **options: "<p>page</p>")


@pytest.mark.nightly
@pytest.mark.usefixtures("one_figure")
def test_a_report_writes_panels_and_latex_where_asked_and_takes_them_away(
    store: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "figures"
    write_report(store, out=tmp_path, options=ReportConfig(paper=Paper.column, latex=True))
    assert sorted(file.name for file in (figures / "paper").glob("*.svg")) == [
        "two-1-column.svg",
        "two-2-column.svg",
    ]
    assert sorted(file.name for file in figures.glob("*.tex")) == ["errors.tex", "points.tex"]
    write_report(store, out=tmp_path)
    assert not (figures / "paper").exists()
    assert list(figures.glob("*.tex")) == []


def test_files_of_the_author_beside_the_figures_stay(tmp_path: Path) -> None:
    for name in ("mine.tex", "points.tex", "curve_gone.svg"):
        (tmp_path / name).write_text("a drawing of the author's")
    (tmp_path / write.LONG).touch()
    write._remove_old_figures(tmp_path, {"two"}, {write.LONG})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.tex", write.LONG]


def test_the_keys_of_a_sweep_and_the_options_of_report_ask_for_the_same(store: Path) -> None:
    asked: list[Any] = []
    report = SimpleNamespace(
        ReportError=RuntimeError,
        write_report=lambda *_, **more: asked.append(more.get("options")) or store / "index.html",  # type: ignore[func-returns-value]
    )
    manifest: Any = SimpleNamespace(overrides=("report.paper=both", "report.serif=true", "report.latex=true"))
    words = ["report", str(store), "--paper", "both", "--serif", "--latex"]
    main(words, report=report)
    main(words[:2], report=report)
    assert asked == [options_of(manifest), ReportConfig()]
    assert asked[0] == ReportConfig(paper=Paper.both, serif=True, latex=True)


def test_what_a_report_shows_is_no_part_of_a_point() -> None:
    words = ["measure=false", "cost=roofline"]
    asked = [*words, "report.paper=column", "report.serif=true", "report.latex=true"]
    plain, wished = (plan_sweep(run_request(given), point).points for given in (words, asked))
    assert [one.fingerprint for one in plain] == [one.fingerprint for one in wished]


def test_options_of_the_whole_report_are_refused_beside_one_figure(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(store), "--x", "cache.block_size", "--serif"]) == 2
    assert "--serif belongs to the whole report" in capsys.readouterr().err
