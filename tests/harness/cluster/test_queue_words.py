"""What Slurm's commands print, read by us; and places that are missing, refused by name. Needs no Slurm."""

import socket
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_point
import pytest

from harness.cli.main import main
from harness.cluster import ray_tasks, slurm
from harness.cluster.book import Book, Submission
from harness.cluster.slurm import Queued, QueueError, end_of, look


def program(folder: Path, name: str, text: str, code: int = 0) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\nprintf '%b' '{text}'\nexit {code}\n")
    file.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the only one that is searched for programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_each_task_of_an_array_has_its_state_and_reason(commands: Path) -> None:
    program(
        commands, "squeue", "7_0|pagetwin-a|RUNNING|None\\n7_1|pagetwin-a|PENDING|Nodes are DOWN, DRAINED\\n"
    )
    assert look() == {
        "7_0": Queued("pagetwin-a", "RUNNING", "None"),
        "7_1": Queued("pagetwin-a", "PENDING", "Nodes are DOWN, DRAINED"),
    }


@pytest.mark.parametrize(
    ("state", "lives"),
    [
        ("PENDING", True),
        ("COMPLETING", True),
        ("REQUEUE_HOLD", True),
        ("CANCELLED", False),
        ("OUT_OF_MEMORY", False),
    ],
)
def test_a_task_that_is_being_ended_or_requeued_still_lives(state: str, lives: bool) -> None:
    assert Queued("a", state, "").lives is lives


def test_a_name_with_the_separator_is_read_whole(commands: Path) -> None:
    program(commands, "squeue", "9|my|job|RUNNING|None\\n")
    assert look()["9"] == Queued("my|job", "RUNNING", "None")


def test_a_command_that_fails_is_no_empty_queue(commands: Path) -> None:
    program(commands, "squeue", "", 1)
    with pytest.raises(QueueError, match="squeue: exit code 1"):
        look()


def test_without_accounting_the_end_of_a_forgotten_task_is_unknown(commands: Path) -> None:
    program(commands, "sacct", "", 1)
    assert end_of("7_0") is None
    program(commands, "sacct", "CANCELLED by 0\\n")
    assert end_of("7_0") == "CANCELLED"


def test_a_job_of_another_name_is_none_of_the_store_whatever_its_id(commands: Path, tmp_path: Path) -> None:
    """Slurm counts from 1 again after its last number, or in a cluster that was set up anew."""
    program(commands, "squeue", "7|pagetwin-a|RUNNING|None\\n8|my-training|RUNNING|None\\n")
    mine = [Submission("pagetwin-a", "/private", [["p"]], number="7")]
    gone = [Submission("pagetwin-b", "/private", [["q"]], number="8")]
    order: Any = SimpleNamespace(again=True)
    driver = slurm._SlurmDriver(order, {}, Book(tmp_path / "jobs.json", mine + gone), None)  # type: ignore[arg-type]
    assert driver._first_look().keys() == {"7"}
    assert list(driver._adopt(driver._first_look())) == []
    assert [each.ended for each in driver.book.submissions] == [False, True]


def test_a_point_that_is_given_up_names_the_jobs_that_it_lost(tmp_path: Path, monkeypatch: Any) -> None:
    """Preempted jobs give no strike: a point has lost more jobs than it has attempts."""
    monkeypatch.setattr(slurm, "store_failure", lambda point, out, error, lines: error)
    order: Any = SimpleNamespace(out=tmp_path, execute=SimpleNamespace(attempts=3))
    driver = slurm._SlurmDriver(order, {}, Book(tmp_path / "jobs.json", []), None)  # type: ignore[arg-type]
    driver.losses["p"] = 30
    point: Any = SimpleNamespace(fingerprint="p")
    assert str(driver._give_up(point, "PREEMPTED", tmp_path / "log")).startswith(
        "30 jobs ended without a result"
    )


def test_a_cluster_is_knocked_at_by_its_client_address_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "auto"):
            ray_tasks._knock(address)
    with pytest.raises(ConnectionRefusedError):
        ray_tasks._knock(f"ray://127.0.0.1:{port}")


def test_a_task_that_a_node_cannot_run_has_failed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises what the task raised: a node without PageTwin. It was run 30 times, and the reason was lost."""
    lost = type("RayError", (Exception,), {})
    raised = type("RayTaskError", (lost,), {})

    def get(reference: str) -> None:
        raise raised("ModuleNotFoundError: No module named 'harness'")

    names = {name: type(name, (lost,), {}) for name in ("OutOfMemoryError", "WorkerCrashedError")}
    errors = SimpleNamespace(RayError=lost, RayTaskError=raised, **names)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=errors))
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    monkeypatch.setattr(ray_tasks, "store_failure", lambda point, out, error, traceback: error)
    sweep: Any = SimpleNamespace(out=Path("out"))
    driver = ray_tasks._RayDriver(sweep, deque(), None, None, None, {"task": "point"})  # type: ignore[arg-type]
    assert driver._take("task") == ("point", "RayTaskError: ModuleNotFoundError: No module named 'harness'")


def run(tmp_path: Path, *words: str) -> int:
    return main(
        [
            "sweep",
            "trace.name=any",
            "measure=false",
            "workers=1",
            "workload.seed=1,2",
            f"out={tmp_path}/store",
            *words,
        ],
        point=fake_point,
        report=fake_point,
    )


def test_slurm_is_refused_where_it_is_not_installed(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.cluster.slurm.find_spec", lambda name: name)
    assert run(tmp_path, "execute=slurm") == 2
    assert "slurm needs sbatch, squeue, scancel, srun, not found here" in capsys.readouterr().err


def test_slurm_is_refused_without_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.cluster.slurm.find_spec", lambda name: None)
    assert run(tmp_path, "execute=slurm") == 2
    assert "pip install '.[cluster]'" in capsys.readouterr().err


def test_a_local_run_is_refused_where_jobs_may_be_at_work_and_cannot_be_asked(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    Book(
        tmp_path / "store" / "jobs.json", [Submission("pagetwin-a", "/private", [["p"]], number="7")]
    ).write()
    assert run(tmp_path) == 2
    assert (
        "whether they have ended cannot be asked from here ('squeue' is not installed here)"
        in capsys.readouterr().err
    )


def test_a_local_run_goes_on_where_all_jobs_have_ended(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    Book(
        tmp_path / "store" / "jobs.json", [Submission("pagetwin-a", "/private", [["p"]], number="7")]
    ).write()
    program(commands, "squeue", "7|pagetwin-a|COMPLETED|None\\n")
    assert run(tmp_path) == 0


def test_the_log_of_a_point_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    names = [file.parent.name for file in sorted((tmp_path / "store").rglob("record.json"))]
    Book(
        tmp_path / "store" / "jobs.json",
        [Submission("pagetwin-a", "/private/a", [[names[0]], [names[1]]], number="7")],
    ).write()
    capsys.readouterr()
    assert main(["logs", f"{tmp_path}/store", "--point", names[1][:9]]) == 0
    assert capsys.readouterr().out.startswith(
        f"{names[1][:12]}  job 7_1  /private/a/7_1_0_log.out  workload.seed="
    )


def test_a_store_without_jobs_has_no_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    assert main(["logs", f"{tmp_path}/store"]) == 2
    assert "ran in Slurm (no jobs.json)" in capsys.readouterr().err


def test_the_command_timeout_is_beyond_slurms_own() -> None:
    assert slurm._TIMEOUT_S > 10


def test_a_repair_is_refused_while_jobs_work_on_the_store(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    store = tmp_path / "store"
    record = next(store.rglob("record.json"))
    record.write_text(record.read_text().replace("any", "odd"))
    Book(store / "jobs.json", [Submission("pagetwin-a", "/private", [["p"]], number="7")]).write()
    program(commands, "squeue", "7|pagetwin-a|RUNNING|None\\n")
    assert main(["doctor", str(store), "--repair"], point=fake_point, report=fake_point) == 2
    assert "doctor --repair would run their points twice" in capsys.readouterr().err
    assert not (store / "damaged").exists()
