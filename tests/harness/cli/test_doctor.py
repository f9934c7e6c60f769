"""`doctor`: what is whole is counted, what is damaged is named, and what the sweep still plans is run again."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_point
import pytest

from harness.cli.main import main
from harness.config.schema import Figures, ReportConfig
from harness.store import ForeignFileError, survey
from harness.store.commit import read_store
from harness.store.manifest import Manifest, SweepPoint, checked_summary, write_manifest
from harness.store.manifest import read_manifest as read_or_none

Cli = Callable[..., tuple[int, str, str]]
STORE = Path("results/default")
POINTS = STORE / "points"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in `tmp_path` with the fake point, after a sweep of three points."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words, point=fake_point, report=fake_point)
        out, err = capfd.readouterr()
        return code, out, err

    run("sweep", "cost.cache_dir=.", "workload.seed=1,2,3")
    return run


def damage(name: str = "steps.parquet") -> Path:
    """Zero some bytes inside a file of the first point."""
    file = next(iter(sorted(POINTS.iterdir()))) / name
    data = bytearray(file.read_bytes())
    data[200:220] = bytes(20)
    file.write_bytes(data)
    return file


def read_manifest(root: Path) -> Manifest:
    found = read_or_none(root)
    assert found is not None
    return found


def edit_manifest(**changes: Any) -> None:
    """Write the manifest as somebody who makes its digest too."""
    write_manifest(STORE, replace(read_manifest(STORE), **changes))


def runs() -> int:
    return len(Path("runs.txt").read_text().splitlines())


def test_a_whole_store_is_said_to_be_whole(cli: Cli) -> None:
    code, out, _ = cli("doctor", "results/default")
    whole, unchecked = out.splitlines()
    assert (code, whole) == (0, "results/default: 3 records and 6 files beside them are whole")
    assert unchecked == "sweep.json, and 2 files of the summary and the report, are whole"


@pytest.mark.parametrize("name", ["steps.parquet", "requests.parquet", "record.json"])
def test_a_damaged_file_is_named_and_nothing_is_changed(cli: Cli, name: str) -> None:
    file = damage(name)
    before = {path: path.stat().st_mtime_ns for path in Path("results").rglob("*")}
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert "2 records and 4 files beside them are whole" in out
    assert f"damaged: {file.parent}/record.json: " in out
    assert {path: path.stat().st_mtime_ns for path in Path("results").rglob("*")} == before


@pytest.mark.nightly
def test_several_processes_find_what_one_finds(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    damage()
    alone = cli("doctor", "results/default")
    monkeypatch.setattr(survey, "_WORTH_WORKERS", 3)
    monkeypatch.setattr(survey, "_PART", 1)
    monkeypatch.setattr(survey.os, "cpu_count", lambda: 2)
    assert cli("doctor", "results/default") == alone


def test_a_damaged_point_is_set_aside_and_run_again(cli: Cli) -> None:
    name = damage().parent.name
    code, out, _ = cli("doctor", "results/default", "--repair")
    assert code == 0
    assert "1 of 1 damaged or missing point repaired" in out
    assert len(read_store(Path("results/default")).records) == 3
    assert Path("results/default/damaged", name, "steps.parquet").exists()
    assert cli("doctor", "results/default")[0] == 0


def test_a_store_that_was_moved_is_repaired_where_it_lies(cli: Cli) -> None:
    damage()
    Path("results/default").rename("elsewhere")
    assert cli("doctor", "elsewhere", "--repair")[0] == 0
    assert len(read_store(Path("elsewhere")).records) == 3
    assert not Path("results/default").exists()


def test_a_point_that_the_sweep_no_longer_plans_is_set_aside_and_not_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage()
    monkeypatch.setattr(fake_point, "point_identity", lambda config: {"code": "new"})
    code, out, err = cli("doctor", "results/default", "--repair")
    assert (code, runs()) == (1, 3)
    assert "1 point cannot be run again: other code, traces or settings" in err
    assert "0 of 1 damaged or missing point repaired" in out


@pytest.mark.parametrize(
    "word", ["scheduler.order=evil:Order", "oracle.python=./evil", "experiment=./evil.yaml"]
)
def test_a_store_whose_command_names_code_is_not_repaired_and_left_as_it_is(cli: Cli, word: str) -> None:
    Path("evil.yaml").write_text("- cache.eviction=evil:Q\n")
    file = damage()
    edit_manifest(command=read_manifest(STORE).command + f" {word}")
    code, _, err = cli("doctor", "results/default", "--repair")
    assert (code, runs()) == (2, 3)
    assert "and no file may" in err
    assert file.exists()


def test_tables_without_a_record_are_damage(cli: Cli) -> None:
    next(POINTS.glob("*/record.json")).unlink()
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert "requests.parquet lies there without a record" in out


def test_a_damaged_manifest_is_named(cli: Cli) -> None:
    Path("results/default/sweep.json").write_text("{")
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert "sweep.json: truncated or not a PageTwin sweep" in out


def test_a_folder_without_results_is_refused(cli: Cli) -> None:
    code, _, err = cli("doctor", "nowhere")
    assert (code, "no results in 'nowhere'" in err) == (2, True)


def test_what_a_store_says_is_escaped_and_cut(cli: Cli) -> None:
    edit_manifest(name="\x1b[2J" + "y" * 5000, report="report/\x1b]0;x\x07")
    _, out, _ = cli("status", "results/default")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 1200


def test_a_command_that_no_file_may_ask_for_is_doubted_where_it_is_shown(cli: Cli) -> None:
    known = read_manifest(STORE)
    more = SweepPoint("0" * 32, ())
    command = known.command + " scheduler.order=evil:Order '; touch x'"
    edit_manifest(command=command, points=(*known.points, more))
    _, out, _ = cli("status", "results/default")
    assert "touch x" not in out
    assert "read that command before you type it: scheduler.order" in out


@pytest.mark.parametrize("name", ["summary.parquet", "report.html", "sweep.json"])
def test_a_damaged_derived_file_is_named(cli: Cli, name: str) -> None:
    file = STORE / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert f"damaged: results/default/{name}" in out


def test_a_damaged_derived_file_is_made_anew_from_the_points(cli: Cli) -> None:
    (STORE / "summary.parquet").write_bytes(b"PAR1 nothing PAR1")
    assert cli("doctor", "results/default", "--repair")[0] == 0
    assert cli("doctor", "results/default")[0] == 0
    assert runs() == 3


def test_a_repair_writes_the_report_that_the_sweep_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("sweep", "cost.cache_dir=.", "workload.seed=1,2,3", "report.figures=svg", "report.latex=true")
    shown: list[ReportConfig] = []
    write = fake_point.write_report
    monkeypatch.setattr(
        fake_point,
        "write_report",
        lambda *words, **more: shown.append(more["options"]) or write(*words, **more),
    )
    (STORE / "summary.parquet").write_bytes(b"PAR1 nothing PAR1")
    assert cli("doctor", "results/default", "--repair")[0] == 0
    assert shown == [ReportConfig(figures=Figures.svg, latex=True)]


def test_a_point_that_was_deleted_is_named_and_run_again(cli: Cli) -> None:
    name = read_manifest(STORE).points[0].fingerprint
    shutil.rmtree(POINTS / name)
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert f"1 point of the sweep missing, as they were deleted or not run: {name}" in out
    assert cli("doctor", "results/default", "--repair")[0] == 0
    assert (POINTS / name / "record.json").exists()


def test_a_file_without_a_digest_is_named(cli: Cli) -> None:
    (STORE / "theirs.html").touch()
    assert "not compared, as it has no digest: theirs.html" in cli("doctor", "results/default")[1]


def test_a_store_of_before_is_whole_and_its_files_are_named(cli: Cli) -> None:
    value = json.loads((STORE / "sweep.json").read_text())
    del value["digest"], value["digests"]
    (STORE / "sweep.json").write_text(json.dumps(value))
    code, out, _ = cli("doctor", "results/default")
    assert code == 0
    assert "not compared, as it has no digest: summary.parquet" in out
    assert checked_summary(STORE) == STORE / "summary.parquet"


def test_a_digest_that_was_taken_out_is_damage(cli: Cli) -> None:
    text = (STORE / "sweep.json").read_text()
    (STORE / "sweep.json").write_text(text.replace('"digest"', '"digesu"', 1))
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert "its digest is missing" in out


def test_a_damaged_summary_is_not_read(cli: Cli) -> None:
    file = STORE / "summary.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ForeignFileError, match=r"summary.parquet does not match its digest.*harness report"):
        checked_summary(STORE)


def test_the_same_sweep_writes_a_damaged_report_anew(cli: Cli) -> None:
    page = STORE / "report.html"
    page.write_text("x")
    cli("sweep", "cost.cache_dir=.", "workload.seed=1,2,3")
    assert page.read_text() != "x"


def test_a_kept_report_of_an_earlier_sweep_is_compared_too(cli: Cli) -> None:
    cli("sweep", "cost.cache_dir=.", "workload.seed=4,5")
    assert cli("doctor", "results/default")[0] == 0
    (STORE / "earlier/1/report.html").write_text("x")
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert "earlier/1/report.html: its file report.html does not match" in out


@pytest.mark.parametrize("name", ["damaged", "report", "points/link"])
@pytest.mark.parametrize("words", [("doctor", "results/default", "--repair"), ("report", "results/default")])
def test_nothing_is_written_through_a_link_of_a_store(
    cli: Cli, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    damage()
    (tmp_path / "elsewhere").mkdir()
    (STORE / name).symlink_to(tmp_path / "elsewhere")
    code, _, err = cli(*words)
    assert code != 0
    assert "is a link" in err
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.nightly
def test_every_one_of_300_bit_flips_over_a_whole_store_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of them in a byte of any, half in any file: the small ones count too."""
    store, dice = tmp_path / "s", random.Random(39)
    words = "sweep measure=false cost=roofline cache.block_size=8,16 workload.num_requests=30 workload.oversize=drop"
    assert main([*words.split(), f"out={store}"]) == 0
    assert main(["doctor", str(store)]) == 0
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    missed = []
    for number in range(300):
        weights = [path.stat().st_size for path in files] if number % 2 else None
        file = dice.choices(files, weights)[0]
        whole = file.read_bytes()
        data, place = bytearray(whole), dice.randrange(len(whole))
        data[place] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        if main(["doctor", str(store)]) != 1:
            missed.append((file, place))
        file.write_bytes(whole)
        capsys.readouterr()
    assert missed == []
