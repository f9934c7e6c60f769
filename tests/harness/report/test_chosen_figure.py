"""The figure whose axes the user chooses."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from harness.cli.main import main
from harness.report import ReportError
from harness.report.write import FigureChoice, write_chosen_figure

X, HUE, COL = "cache.block_size", "decoding.beam_width", "workload.prefix_share"


def table(files: list[Path]) -> pd.DataFrame:
    return pd.read_csv(next(path for path in files if path.suffix == ".csv"))


@pytest.mark.nightly
def test_a_figure_is_written_as_svg_pdf_and_csv_beside_the_report(store: Path, tmp_path: Path) -> None:
    files = write_chosen_figure(store, FigureChoice(X), out=tmp_path)
    assert {path.suffix for path in files} == {".svg", ".pdf", ".csv"}
    assert all(path.parent == tmp_path / "figures" and path.stat().st_size for path in files)


@pytest.mark.nightly
def test_lines_and_columns_are_the_chosen_settings(store: Path, tmp_path: Path) -> None:
    found = table(write_chosen_figure(store, FigureChoice(X, HUE, COL), out=tmp_path))
    paged = found[found["cache.policy"] == "paged"]
    assert set(paged["series"].astype(int)) == {1, 2}
    assert set(paged["column"].astype(float)) == {0.0, 0.5}


@pytest.mark.nightly
def test_only_points_of_the_named_value_are_drawn(store: Path, tmp_path: Path) -> None:
    found = table(write_chosen_figure(store, FigureChoice(X, HUE, where={COL: "0.5"}), out=tmp_path))
    assert found["point"].str.contains("prefix_share=0.5").all()


def test_what_is_held_is_said(store: Path, tmp_path: Path) -> None:
    said: list[str] = []
    choice = FigureChoice(X, where={COL: "0.5"}, metrics=("ttft_p50",))
    write_chosen_figure(store, choice, out=tmp_path, tell=said.append)
    (caption,) = said
    assert f"cache policy paged, {HUE}=2: 2 of its 4 points." in caption
    assert caption.endswith(f"Chosen: {COL}=0.5.")


def test_only_the_named_metrics_are_rows(store: Path, tmp_path: Path) -> None:
    found = table(write_chosen_figure(store, FigureChoice(X, metrics=("ttft_p50",)), out=tmp_path))
    assert set(found["metric"]) == {"ttft_p50"}


@pytest.mark.nightly
def test_two_choices_do_not_overwrite_each_other(store: Path, tmp_path: Path) -> None:
    one = write_chosen_figure(store, FigureChoice(X, where={COL: "0.0"}), out=tmp_path)
    two = write_chosen_figure(store, FigureChoice(X, where={COL: "0.5"}), out=tmp_path)
    assert not {*one} & {*two}


@pytest.mark.nightly
def test_the_report_stays_as_it_is(page: Path, tmp_path: Path) -> None:
    copied = tmp_path / "store"  # the other tests look at the folder of `page`
    shutil.copytree(page.parents[1], copied)
    files = write_chosen_figure(copied, FigureChoice(X))
    assert (copied / "report" / "index.html").read_bytes() == page.read_bytes()
    assert all(path.parent == copied / "report" / "figures" for path in files)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            FigureChoice("cache.blocksize"),
            "--x: 'cache.blocksize' is no swept number here; allowed are .*block_size",
        ),
        (FigureChoice(X, "model.name"), "--hue: 'model.name' is not swept"),
        (FigureChoice(X, None, X), "--col: 'cache.block_size' is not swept here or drawn already"),
        (FigureChoice(X, HUE, HUE), "--hue and --col are both"),
        (FigureChoice(X, metrics=("ttft",)), "--metric: no metric is called 'ttft'; did you mean .*ttft_"),
        (FigureChoice(X, metrics=()), "--metric: name at least one"),
        (
            FigureChoice(X, where={COL: "0.7"}),
            r"--where: no point has workload.prefix_share=0.7; allowed are 0.0, 0.5",
        ),
        (FigureChoice(X, where={"seed": "1"}), "--where: 'seed' is not swept here"),
        (FigureChoice(X, where={X: "8"}), "'cache.block_size' is drawn already"),
    ],
)
def test_a_choice_that_does_not_fit_the_store_names_what_is_allowed(
    store: Path, tmp_path: Path, choice: FigureChoice, message: str
) -> None:
    with pytest.raises(ReportError, match=message):
        write_chosen_figure(store, choice, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_files(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "report",
        str(store),
        "--out",
        str(tmp_path),
        "--x",
        X,
        "--where",
        f"{COL}=0.5",
        "--metric",
        "ttft_p50",
    ]
    assert main(words) == 0
    assert "figure: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hue", HUE], "--hue needs --x KEY"),
        (["--x", X, "--markdown", "a.md"], "--markdown belongs to the whole report"),
        (["--x", X, "--where", COL], f"--where: '{COL}' is not KEY=VALUE"),
        (["--x", X, "--where", f"{COL}=0", "--where", f"{COL}=1"], "named twice"),
    ],
)
def test_a_wrong_option_of_the_figure_is_named(
    store: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(store), *words]) == 2
    assert message in capsys.readouterr().err
