"""`doctor`: what is whole is counted, what is damaged is named, and what the sweep still plans is run again."""

import json
from collections.abc import Callable
from pathlib import Path

import fake_point
import pytest

from harness.cli.main import main
from harness.store import survey
from harness.store.reading import read_store

Cli = Callable[..., tuple[int, str, str]]
POINTS = "results/default/points"


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
    file = next(iter(sorted(Path(POINTS).iterdir()))) / name
    data = bytearray(file.read_bytes())
    data[200:220] = bytes(20)
    file.write_bytes(data)
    return file


def runs() -> int:
    return len(Path("runs.txt").read_text().splitlines())


def test_a_whole_store_is_said_to_be_whole(cli: Cli) -> None:
    code, out, _ = cli("doctor", "results/default")
    whole, unchecked = out.splitlines()
    assert (code, whole) == (0, "results/default: 3 records and 6 files beside them are whole")
    assert unchecked == "not compared, as they have no digests: summary.parquet, sweep.json and the report"


@pytest.mark.parametrize("name", ["steps.parquet", "requests.parquet", "record.json"])
def test_a_damaged_file_is_named_and_nothing_is_changed(cli: Cli, name: str) -> None:
    file = damage(name)
    before = {path: path.stat().st_mtime_ns for path in Path("results").rglob("*")}
    code, out, _ = cli("doctor", "results/default")
    assert code == 1
    assert "2 records and 4 files beside them are whole" in out
    assert f"damaged: {file.parent}/record.json: " in out
    assert {path: path.stat().st_mtime_ns for path in Path("results").rglob("*")} == before


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
    assert "1 of 1 damaged point repaired" in out
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
    assert "0 of 1 damaged point repaired" in out


@pytest.mark.parametrize(
    "word", ["scheduler.order=evil:Order", "oracle.python=./evil", "experiment=./evil.yaml"]
)
def test_a_store_whose_command_names_code_is_not_repaired_and_left_as_it_is(cli: Cli, word: str) -> None:
    Path("evil.yaml").write_text("- cache.eviction=evil:Q\n")
    file = damage()
    manifest = Path("results/default/sweep.json")
    manifest.write_text(
        manifest.read_text().replace('workload.seed=1,2,3",', f'workload.seed=1,2,3 {word}",', 1)
    )
    code, _, err = cli("doctor", "results/default", "--repair")
    assert (code, runs()) == (2, 3)
    assert "and no file may" in err
    assert file.exists()


def test_tables_without_a_record_are_damage(cli: Cli) -> None:
    next(Path(POINTS).glob("*/record.json")).unlink()
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
    manifest = Path("results/default/sweep.json")
    value = json.loads(manifest.read_text())
    value |= {"name": "\x1b[2J" + "y" * 5000, "report": "report/\x1b]0;x\x07"}
    manifest.write_text(json.dumps(value))
    _, out, _ = cli("status", "results/default")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 1200


def test_a_command_that_no_file_may_ask_for_is_doubted_where_it_is_shown(cli: Cli) -> None:
    manifest = Path("results/default/sweep.json")
    value = json.loads(manifest.read_text())
    value["points"].append({"fingerprint": "0" * 32, "overrides": []})
    value["command"] = value["command"] + " scheduler.order=evil:Order '; touch x'"
    manifest.write_text(json.dumps(value))
    _, out, _ = cli("status", "results/default")
    assert "touch x" not in out
    assert "read that command before you type it: scheduler.order" in out
