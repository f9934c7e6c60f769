"""The command line: messages and exit codes, resume, and never a traceback for a user's mistake."""

import errno
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import fake_point
import pytest
from fake_point import ReportError

from harness.cli.main import main
from harness.config.schema import RunConfig
from harness.metrics.record import PointRecord
from harness.store import atomic
from harness.store.atomic import exclusive
from harness.store.commit import commit_point
from harness.sweep.plan import in_its_own_place, run_request

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in `tmp_path` with the fake point; gives exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words, point=fake_point, report=fake_point)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


def runs(folder: Path) -> list[str]:
    """The points that ran, in order."""
    file = folder / "runs.txt"
    return file.read_text().splitlines() if file.exists() else []


def sweep(*words: str) -> tuple[str, ...]:
    return ("sweep", "cost.cache_dir=.", *words)


def test_a_finished_sweep_prints_verdict_and_report(cli: Cli) -> None:
    code, out, _ = cli(*sweep("workload.seed=1,2"))
    assert code == 0
    assert out == "prediction and measurement agree\nreport: results/default/report.html\n"


def test_a_finished_sweep_has_nothing_left_to_do(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    code, out, _ = cli(*sweep("workload.seed=1,2"))
    assert code == 0
    assert out.startswith("nothing left to do: all 2 points are in results/default\nprediction and")
    assert len(runs(tmp_path)) == 2


def test_only_new_points_of_a_wider_sweep_run(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    cli(*sweep("workload.seed=2,3"))
    assert runs(tmp_path) == ["azure_conv 1", "azure_conv 2", "azure_conv 3"]


def test_force_runs_again(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    code, _, _ = cli(*sweep("workload.seed=1,2", "--force"))
    assert code == 0
    assert len(runs(tmp_path)) == 4


def test_failed_points_are_listed_with_their_traceback_and_exit_code_1(cli: Cli) -> None:
    code, out, _ = cli(*sweep("trace.name=ok,fail"))
    assert code == 1
    assert "1 of 2 points are done, 1 failed:\n  trace.name=fail: RuntimeError: the point is broken" in out
    path = Path(out.partition("traceback: ")[2].splitlines()[0])
    assert json.loads(path.read_text())["error"] == "RuntimeError: the point is broken"


def test_the_same_command_retries_the_failed_points_only(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("trace.name=ok,fail"))
    (tmp_path / "fixed").touch()
    code, _, _ = cli(*sweep("trace.name=ok,fail"))
    assert code == 0
    assert runs(tmp_path) == ["ok 0", "fail 0", "fail 0"]


def test_ctrl_c_says_how_to_go_on_and_exits_with_130(cli: Cli, tmp_path: Path) -> None:
    command = sweep("trace.name=ok,interrupt", "name=mine")
    code, _, err = cli(*command)
    assert code == 130
    assert "stopped: 1 of 2 points are done and kept in results/mine" in err
    assert f"Go on with the same command: python -m harness {' '.join(command)}" in err
    (tmp_path / "fixed").touch()
    assert cli(*command)[0] == 0
    assert runs(tmp_path) == ["ok 0", "interrupt 0", "interrupt 0"]


def test_one_bad_point_and_nothing_runs(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli(*sweep("cache.block_size=8,0", "trace.name=ok,never-fits"))
    assert code == 2
    assert "nothing was run: 3 of 4 points cannot run" in err
    assert "cache.block_size: found 0, must be 1 or greater" in err
    assert "cache.pool_tokens: request 3 needs 99 blocks, the pool has 9" in err
    assert runs(tmp_path) == []
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sweep", "cache.block_sise=8"],
            "error: cache.block_sise: no such key; did you mean 'cache.block_size'?",
        ),
        (["sweep", "+engine.block_sise=8"], "did you mean 'cache.block_size'?"),
        (["run", "cache.block_size=abc"], "error: cache.block_size: found 'abc', must be a whole number"),
        (
            ["run", "workload.prefix_share=2"],
            "error: workload.prefix_share: found 2.0, must be 0 or greater and",
        ),
        (["run", "trace=azure", "trace.path=no.csv"], "error: trace.path: no such file: 'no.csv'"),
        (["run", "cache=pagd"], "no option 'pagd'; the options are"),
        (
            ["run", "workload.seed=1,2"],
            "'run' takes one point, but there are several values of workload.seed",
        ),
        (["run", "fast"], "'fast' is not an override (key=value); see: python -m harness run --help"),
        (["sweep", "--fast"], "'sweep' has no option '--fast'; see: python -m harness sweep --help"),
        (["status", "a=1"], "no results in 'a=1'"),
        (["report", "nowhere"], "no results in 'nowhere' (no sweep.json, no points/)"),
        (["status"], "no results under results/; run 'python -m harness sweep' first"),
        (["trace", "inspect", "nowhere"], "'nowhere' is neither a file nor a generator (azure_conv"),
        (["show", "cache.block_size=0"], "error: cache.block_size: found 0"),
    ],
)
def test_a_users_mistake_gets_a_message_and_exit_code_2(cli: Cli, words: list[str], message: str) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("words", [[], ["nonsense"], ["trace"], ["sweep", "--dry-run=3"]])
def test_a_command_line_that_cannot_be_read_exits_with_2(cli: Cli, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli(*words)
    assert caught.value.code == 2


def test_flags_may_stand_between_overrides(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("sweep", "cache.block_size=8,16", "--dry-run", "cost.cache_dir=.")
    assert code == 0
    assert "2 points, 2 to run" in out
    assert runs(tmp_path) == []


def test_a_dry_run_tells_done_from_todo_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("trace.name=ok,fail"))
    before = sorted(tmp_path.rglob("*"))
    _, out, _ = cli(*sweep("trace.name=ok,fail,slow", "--dry-run"))
    states = [line.split("  ")[1].strip() for line in out.splitlines()[:3]]
    assert states == ["done", "failed before", "todo"]
    assert sorted(tmp_path.rglob("*")) == before


def learned(tmp_path: Path, *seconds: float) -> None:
    """Commit finished points of the default kind that took so many seconds for 100 requests each."""
    for number, took in enumerate(seconds):
        config = asdict(RunConfig(measure=False))
        record = PointRecord(config=config, trace={"requests": 100}, seconds={"point": took})
        commit_point(tmp_path / "results" / "default", f"{number + 1:032x}", record, {})


def test_a_dry_run_says_how_long_by_what_earlier_points_took(cli: Cli, tmp_path: Path) -> None:
    learned(tmp_path, 99.0, 100.0, 101.0)
    words = ("measure=false", "workers=2", "workload.num_requests=100", "workload.seed=range(20)")
    _, out, _ = cli(*sweep(*words, "--dry-run"))
    assert "time: about 17 min with 2 workers (95 % interval 16 min to 17 min)" in out
    assert "learned from 3 earlier points" in out


def test_a_long_sweep_says_at_its_start_how_long_it_will_take(cli: Cli, tmp_path: Path) -> None:
    learned(tmp_path, 99.0, 100.0, 101.0)
    words = ("measure=false", "workers=1", "workload.num_requests=100", "workload.seed=1,2")
    _, _, err = cli(*sweep(*words))
    assert "time: about 3 min with 1 worker" in err
    assert "[1/2] 50 % of the work done, about " in err


def test_points_that_are_the_same_run_are_said_to_be(cli: Cli) -> None:
    _, out, err = cli(*sweep("cache=contiguous_max", "cache.block_size=8,16", "--dry-run"))
    assert "1 combination is the same run as another" in err
    assert "1 point, 1 to run" in out


def test_an_unwritable_results_folder_is_named_before_anything_runs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic, "_write", refuse)
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 2
    assert "error: out: cannot write to results/default: the file system is read-only; choose another" in err
    assert runs(tmp_path) == []


def test_a_results_folder_that_is_a_file_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    code, _, err = cli(*sweep("out=taken/x"))
    assert code == 2
    assert "out: cannot use 'taken/x'" in err


def test_a_disk_that_fills_mid_sweep_keeps_committed_points(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tables = atomic._write, iter(range(100))

    def fill_up(path: Path, data: bytes) -> None:
        if path.name.startswith(".steps") and next(tables) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(atomic, "_write", fill_up)
    code, _, err = cli(*sweep("workload.seed=1,2,3"))
    assert code == 1
    assert (
        "the disk is full; free some space and repeat the command\nPoints that were committed before are kept."
        in err
    )
    assert len(list(tmp_path.rglob("record.json"))) == 1
    assert list(tmp_path.rglob("*.tmp")) == []
    assert cli(*sweep("workload.seed=1,2,3"))[0] == 0
    assert len(runs(tmp_path)) == 4


def test_a_half_written_record_is_named_and_its_point_done_again(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    record = next(tmp_path.rglob("record.json"))
    record.write_bytes(record.read_bytes()[:100])
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 0
    assert f"skipped {record.relative_to(tmp_path)}: truncated or not JSON" in err
    assert len(runs(tmp_path)) == 3
    json.loads(record.read_text())


def test_a_record_of_another_schema_stops_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    record = next(tmp_path.rglob("record.json"))
    record.write_text('{"schema": 99}')
    code, _, err = cli(*sweep("workload.seed=1,2,3"))
    assert code == 2
    assert "written with record schema 99" in err


def test_status_counts_done_failed_and_left(cli: Cli) -> None:
    cli(*sweep("trace.name=ok,fail"))
    code, out, err = cli("status")
    assert code == 0
    assert "newest store: results/default" in err
    assert (
        "results/default: sweep 'default', 1 of 2 points done\n1 failed:\n  trace.name=fail: Runtime" in out
    )
    assert "Go on with: python -m harness sweep" in out


@pytest.mark.nightly
def test_a_message_is_never_longer_than_thirty_lines(cli: Cli) -> None:
    code, _, err = cli("sweep", *(f"no.such.key{number}=1" for number in range(100)))
    assert code == 2
    assert len(err.splitlines()) == 30


def test_a_line_of_a_message_is_never_endless(cli: Cli) -> None:
    code, _, err = cli("sweep", "name=" + "/" * 20_000)
    assert code == 2
    assert len(err) < 3_000
    assert "more characters" in err


def test_status_names_files_that_are_not_whole(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    record = next(tmp_path.rglob("record.json"))
    record.write_text("{")
    _, out, _ = cli("status", "results/default")
    assert "record.json: truncated or not JSON" in out
    assert "1 of 2 points done" in out


def test_a_finished_sweep_removes_what_a_killed_process_left_in_its_store(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    folder = next(tmp_path.rglob("record.json")).parent
    with subprocess.Popen(["true"]) as ended:
        pass
    left = folder / f".record.json.{ended.pid}.tmp"
    left.write_text("{")
    assert "nothing left to do" in cli(*sweep("workload.seed=1,2"))[1]
    assert not left.exists()


def test_report_is_written_again_from_the_store(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    (tmp_path / "results/default/report.html").unlink()
    (tmp_path / "results/default/summary.parquet").unlink()
    code, out, _ = cli("report")
    assert code == 0
    assert "report: results/default/report.html" in out
    assert (tmp_path / "results/default/summary.parquet").exists()


def test_a_report_can_go_elsewhere(cli: Cli) -> None:
    cli(*sweep("workload.seed=1,2"))
    assert cli("report", "results/default", "--out", "paper")[1].endswith("report: paper/report.html\n")
    assert Path("paper/report.html").exists()


def test_a_report_that_goes_elsewhere_changes_nothing_in_the_store(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")}
    assert cli("report", "results/default", "--out", "paper")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")} == before
    assert Path("paper/summary.parquet").exists()


@pytest.mark.parametrize("name", ["copy", "a copy, with (signs)"])
def test_the_status_of_a_copied_store_goes_on_in_the_copy(cli: Cli, tmp_path: Path, name: str) -> None:
    cli(*sweep("workload.seed=1,2", "out=first"))
    shutil.copytree("first", name)
    shutil.rmtree(next(Path(name, "points").iterdir()))
    _, out, _ = cli("status", name)
    (line,) = [line for line in out.splitlines() if "Go on with: " in line]
    words = shlex.split(line.partition("python -m harness ")[2])
    assert "out=first" not in words
    code, out, _ = cli(*words)
    assert (code, len(runs(tmp_path))) == (0, 3)


def test_show_prints_the_configuration_and_where_it_came_from(cli: Cli) -> None:
    code, out, _ = cli("show", "cache=contiguous_max", "workload.seed=3,4")
    assert code == 0
    assert "# cache=contiguous_max: Choose as the baseline" in out
    assert "# sweep over workload.seed=3,4; shown is workload.seed=3" in out
    assert "\n  seed: 3\n" in out


def test_show_lists_groups(cli: Cli) -> None:
    _, out, _ = cli("show", "--groups")
    assert "\ndevice\n" in out
    assert "  h200 " in out


def test_trace_ls_lists_generators_and_files(cli: Cli) -> None:
    _, out, _ = cli("trace", "ls")
    assert "azure_conv" in out
    assert "licence" in out.lower() or "CC" in out


def test_trace_inspect_prints_statistics_of_a_generator(cli: Cli) -> None:
    _, out, _ = cli("trace", "inspect", "azure_conv", "--requests", "50")
    assert "prompt_tokens" in out


def test_trace_inspect_names_file_line_and_reason_of_a_broken_trace(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,x,44\n"
    )
    code, _, err = cli("trace", "inspect", "bad.csv")
    assert code == 2
    assert "bad.csv:2: ContextTokens" in err


def test_a_bug_of_ours_says_where_its_traceback_is(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_point.point_identity", lambda config: 1 / 0)
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 1
    assert "This is a bug in PageTwin" in err
    assert "ZeroDivisionError" in Path(err.strip().rpartition(" ")[2]).read_text()


def test_a_run_has_a_place_of_its_own_and_leaves_the_default_report(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    before = (tmp_path / "results/default/report.html").read_bytes()
    _, out, _ = cli("run", *sweep("workload.seed=3")[1:])
    assert "report: results/run_workload.seed=3/report.html" in out
    assert (tmp_path / "results/default/report.html").read_bytes() == before


def test_runs_whose_settings_make_no_file_name_do_not_share_a_place() -> None:
    places = {
        next(
            axis.settings[0].value for axis in in_its_own_place(run_request([text])).axes if axis.key == "out"
        )
        for text in ("trace.path=a/b", "trace.path=a:b")
    }
    assert len(places) == 2
    assert all(place.count("/") == 1 for place in places)


def test_a_report_on_another_question_is_moved_aside_and_named(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    before = (tmp_path / "results/default/report.html").read_bytes()
    _, _, err = cli(*sweep("workload.seed=2,3"))
    assert "the report of 'python -m harness sweep cost.cache_dir=. workload.seed=1,2' is kept in" in err
    assert (tmp_path / "results/default/earlier/1/report.html").read_bytes() == before


def test_a_narrower_sweep_that_is_done_already_gets_a_report_of_its_own(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    code, out, _ = cli("run", *sweep("workload.seed=1", "out=results/default")[1:])
    assert code == 0
    asked = json.loads((tmp_path / "results/default/report.html").read_text())
    assert [point["overrides"] for point in asked] == [["workload.seed=1"]]
    assert "nothing left to do: all 1 points" in out


def test_a_second_sweep_in_the_same_folder_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1,2"))
    with exclusive(tmp_path / "results/default"):
        code, _, err = cli(*sweep("workload.seed=3,4"))
    assert code == 2
    assert f"another sweep (process {os.getpid()}) is writing to 'results/default'" in err
    assert len(runs(tmp_path)) == 2


def test_a_folder_where_points_cannot_be_kept_is_named_before_any_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/points").touch()
    code, _, err = cli(*sweep("workload.seed=1", "out=mine"))
    assert code == 2
    assert "out: cannot write to mine/points" in err
    assert runs(tmp_path) == []


def test_a_manifest_of_another_version_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    cli(*sweep("workload.seed=1"))
    file = tmp_path / "results/default/sweep.json"
    file.write_text('{"schema": 99}')
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 2
    assert "schema 99, this PageTwin reads 1; use the version that wrote it" in err
    assert file.read_text() == '{"schema": 99}'


def test_ctrl_c_while_the_report_is_written_says_how_to_go_on(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("fake_point.write_report", stop)
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 130
    assert "the points are kept in results/default" in err
    assert "Go on with the same command: python -m harness sweep cost.cache_dir=. workload.seed=1,2" in err


def test_a_value_given_twice_is_said_to_be(cli: Cli) -> None:
    _, out, err = cli(*sweep("cache.block_size=8,8", "--dry-run"))
    assert "1 combination is the same run as another, because a value was given twice" in err
    assert "1 point, 1 to run" in out


def test_more_points_than_anyone_can_want_are_refused(cli: Cli) -> None:
    code, _, err = cli(*sweep("workload.seed=range(0,1000)", "model.seed=range(0,1000)"))
    assert code == 2
    assert "1,000,000 points asked for, at most 100,000 are allowed" in err


def test_a_point_that_does_not_fit_the_memory_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("fake_point.check_point", too_large)
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 2
    assert "does not fit the memory: lower workload.num_requests" in err


def test_where_calibrations_lie_is_no_part_of_a_points_name(cli: Cli) -> None:
    _, out, _ = cli("run", "cost.cache_dir=.", "workload.seed=1", "--dry-run")
    assert "cost.cache_dir" not in out


def test_an_error_of_many_lines_takes_one_in_the_list(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first\n   second")

    monkeypatch.setattr("fake_point.run_point", fail)
    _, out, _ = cli(*sweep("workload.seed=1,2"))
    assert "workload.seed=1: RuntimeError: first second\n" in out


def test_the_usage_of_trace_inspect_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "inspect", "azure_conv", "--requests", "x"])
    assert (
        "python -m harness trace inspect: error: argument --requests: invalid int" in capsys.readouterr().err
    )


def test_a_report_that_cannot_be_written_is_no_reason_to_lose_the_points(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise ReportError("cannot write the report: the disk is full")

    monkeypatch.setattr("fake_point.write_report", fail)
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 1
    assert "error: cannot write the report: the disk is full\nThe points are kept." in err
    assert len(list(tmp_path.rglob("record.json"))) == 2


def test_a_missing_dependency_is_named_with_the_way_to_get_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: object) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich.console")

    monkeypatch.setattr("fake_point.check_point", missing)
    code, _, err = cli(*sweep("workload.seed=1,2"))
    assert code == 1
    assert "error: the package 'rich.console' is not installed for " in err
    assert "make setup" in err


@pytest.mark.parametrize(
    "setting",
    [
        *("decoding.acceptance=0.7", "decoding.branch_hazard=0.1", "replay.users=3"),
        *("device.expert_parallel=true", "device.tables_dense=1.1"),
    ],
)
def test_a_setting_that_means_nothing_at_any_point_is_named(cli: Cli, setting: str) -> None:
    _, _, err = cli(*sweep(setting, "cache.block_size=8,16", "--dry-run"))
    assert f"without effect beside the other settings: {setting}" in err


@pytest.mark.parametrize("setting", ["decoding.temperature=0.7", "replay.repeats=5"])
def test_what_a_measured_side_alone_reads_is_named_of_a_prediction(cli: Cli, setting: str) -> None:
    words = (setting, "decoding.mode=sample", "cache.block_size=8,16", "--dry-run")
    for measure in ("true", "false"):
        _, _, err = cli(*sweep(f"measure={measure}", *words))
        assert (f"without effect beside the other settings: {setting}" in err) is (measure == "false")


def test_a_setting_that_means_something_at_one_point_is_not_named(cli: Cli) -> None:
    words = (
        "cache.block_size=8",
        "cache=paged,contiguous_max",
        "report.kernels=none",
        "decoding.acceptance=null",
    )
    _, _, err = cli(*sweep(*words, "--dry-run"))
    assert "without effect" not in err


def test_a_glob_that_fits_no_option_is_refused(cli: Cli) -> None:
    code, _, err = cli("sweep", "cache=glob(zzz*)")
    assert code == 2
    assert "cache: no option fits 'glob(zzz*)'; the options are" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--max-requests", "0"], "--max-requests is 0, must be at least 1"),
        (["bench", "kernels", "--rounds", "0"], "--rounds is 0, must be at least 1"),
    ],
)
def test_a_senseless_flag_is_refused(cli: Cli, words: list[str], message: str) -> None:
    code, _, err = cli(*words)
    assert (code, message in err) == (2, True), err


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_trace_that_may_never_end_is_refused(cli: Cli, tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    name = "pipe" if kind == "pipe" else "/dev/urandom"
    code, _, err = cli("trace", "validate", name)
    assert (code, err) == (2, f"error: '{name}' is a pipe or a device; name a trace file, or a folder\n")


@pytest.mark.parametrize("words", [["advise", "x.yaml"], ["twin", "x.yaml"], ["run", "deployment=x.yaml"]])
def test_no_command_waits_for_a_pipe(cli: Cli, tmp_path: Path, words: list[str]) -> None:
    os.mkfifo(tmp_path / "x.yaml")
    code, _, err = cli(*words)
    assert (code, "is a pipe" in err) == (2, True), err


def test_results_do_not_go_through_a_link_that_leads_nowhere(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = cli(*sweep("measure=false", "out=loop/store", "workload.seed=1"))
    assert code == 2
    assert "loop is a link that leads nowhere" in err


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_an_address_of_ray_has_a_port_that_exists(cli: Cli, port: int) -> None:
    words = ("measure=false", "execute=ray", f"execute.address=127.0.0.1:{port}", "workload.seed=1")
    code, _, err = cli(*sweep(*words))
    assert code == 2
    assert "execute.address: found '127.0.0.1" in err


def manifest(folder: Path, *, point: str = "a", out: str = "results/default") -> None:
    """A store whose manifest names this point and this place."""
    words = {"command": f"python -m harness sweep out={out}", "overrides": [f"out={out}"]}
    entry = {"fingerprint": point, "overrides": ["a=1"]}
    value = {"schema": 1, "name": "x", **words, "points": [entry], "report": None, "verdict": []}
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps(value))


def test_a_manifest_whose_point_is_a_path_is_not_read(cli: Cli, tmp_path: Path) -> None:
    manifest(tmp_path / "store", point="../../elsewhere")
    code, out, err = cli("status", "store")
    assert code == 0
    assert "a point named '../../elsewhere', which is no name of a point" in err
    assert "0 points done" in out


@pytest.mark.parametrize("out", ["gs://bucket/x", "s3://B/x"])
def test_a_store_that_was_written_to_a_place_that_is_unknown_here_has_a_status(
    cli: Cli, tmp_path: Path, out: str
) -> None:
    manifest(tmp_path / "store", out=out)
    code, said, _ = cli("status", "store")
    assert code == 0
    assert "Go on with: python -m harness sweep out=store" in said


def test_the_names_of_a_store_add_no_line_to_its_status(cli: Cli, tmp_path: Path) -> None:
    manifest(tmp_path / "store")
    file = tmp_path / "store" / "sweep.json"
    file.write_text(file.read_text().replace('"x"', '"x\\n9 of 9 points done"'))
    _, out, _ = cli("status", "store")
    assert "sweep 'x\\n9 of 9 points done', 0 of " in out
    assert "9 of 9 points done" not in out.splitlines()


def test_a_row_of_a_comparison_holds_plain_values_alone(cli: Cli, tmp_path: Path) -> None:
    rows = [{"metric": "ttft_p50", "error": {}, "spread": []}]
    commit_point(tmp_path / "store", "a", PointRecord(comparison=rows), {})
    code, out, _ = cli("status", "store")
    assert code == 0
    assert "its section 'comparison' is no list of rows" in out
