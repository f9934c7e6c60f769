"""Commits are whole or absent: full disks, missing permission, kills at any moment."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.metrics.record import PointRecord
from harness.store import StoreError, atomic
from harness.store.atomic import check_writable, remove_leftovers, write_files
from harness.store.commit import commit_failure, commit_point, read_store, read_table

TABLES = {
    "steps": {"step": np.arange(3), "seconds": [0.1, 0.2, float("nan")]},
    "requests": {"request_id": [7]},
}


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def fail_after(monkeypatch: pytest.MonkeyPatch, writes: int, error: int) -> None:
    """Let `writes` files reach the disk; the next fsync fails."""
    left = iter([None] * writes)

    def fsync(handle: int) -> None:
        if next(left, "full") == "full":
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(atomic.os, "fsync", fsync)


def test_a_committed_point_is_read_back(tmp_path: Path) -> None:
    commit_point(tmp_path, "abc", PointRecord(name="x", simulated={"value": np.float64(1.5)}), TABLES)
    content = read_store(tmp_path)
    assert content.records["abc"].simulated["value"] == 1.5
    assert content.problems == []
    assert read_table(tmp_path, "abc", "steps")["step"].tolist() == [0, 1, 2]


def test_a_record_is_strict_json(tmp_path: Path) -> None:
    commit_point(tmp_path, "abc", PointRecord(pool={"nan": float("nan"), "inf": np.inf, "shape": (1, 2)}), {})
    record = json.loads((tmp_path / "points/abc/record.json").read_text(), parse_constant=pytest.fail)
    assert record["pool"] == {"nan": None, "inf": None, "shape": [1, 2]}


@pytest.mark.parametrize("writes", range(3))
def test_a_disk_that_fills_mid_commit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    commit_point(tmp_path, "first", PointRecord(), TABLES)
    before = everything(tmp_path)
    fail_after(monkeypatch, writes, errno.ENOSPC)
    with pytest.raises(StoreError, match=r"the disk is full; free some space and repeat the command"):
        commit_point(tmp_path, "second", PointRecord(), TABLES)
    assert everything(tmp_path) == before


def test_a_disk_that_fills_while_a_point_is_replaced_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_point(tmp_path, "abc", PointRecord(), TABLES)
    before = everything(tmp_path)
    fail_after(monkeypatch, 2, errno.ENOSPC)
    with pytest.raises(StoreError):
        commit_point(tmp_path, "abc", PointRecord(name="other"), TABLES)
    assert everything(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_really_full_device_gives_the_same_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_write", lambda path, data: write_to_full_device(data))
    with pytest.raises(StoreError, match="the disk is full"):
        write_files(tmp_path, {"a": b"x" * 100_000})


def write_to_full_device(data: bytes) -> None:
    with Path("/dev/full").open("wb") as device:
        device.write(data)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write to .*file/store"):
        check_writable(tmp_path / "file" / "store")


def test_probing_a_folder_leaves_nothing_in_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "store")
    assert everything(tmp_path) == {}


def test_an_interrupted_commit_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        commit_point(tmp_path, "abc", PointRecord(), TABLES)
    assert everything(tmp_path) == {}


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    (tmp_path / "points/abc").mkdir(parents=True)
    (tmp_path / f"points/abc/.record.json.{int(gone.stdout)}.tmp").write_bytes(b'{"sch')
    assert remove_leftovers(tmp_path) == 1
    assert everything(tmp_path) == {}


def test_temporary_files_of_a_living_process_stay(tmp_path: Path) -> None:
    (tmp_path / f".record.json.{os.getppid()}.tmp").touch()
    assert remove_leftovers(tmp_path) == 0


def test_success_forgets_an_earlier_failure(tmp_path: Path) -> None:
    commit_failure(tmp_path, "abc", {"error": "boom"})
    assert set(read_store(tmp_path).failures) == {"abc"}
    commit_point(tmp_path, "abc", PointRecord(), TABLES)
    content = read_store(tmp_path)
    assert (set(content.records), set(content.failures)) == ({"abc"}, set())


def test_what_a_dead_process_left_is_removed_even_if_its_number_lives_again(tmp_path: Path) -> None:
    owner = (
        f"{atomic._host()}-{os.getppid()}-1"  # a process that started long before the one of that number now
    )
    (tmp_path / f".record.json.{owner}.tmp").touch()
    (tmp_path / f"probe-{owner}").touch()
    assert remove_leftovers(tmp_path) == 2
    assert everything(tmp_path) == {}


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    owner = f"{atomic._host()}-{os.getppid()}-{atomic._start_of(os.getppid())}"
    (tmp_path / f".record.json.{owner}.tmp").touch()
    (tmp_path / f"probe-{owner}").touch()
    assert remove_leftovers(tmp_path) == 0


def test_what_another_machine_writes_stays(tmp_path: Path) -> None:
    (tmp_path / ".record.json.elsewhere-999999999-1.tmp").touch()
    assert remove_leftovers(tmp_path) == 0


def test_the_probe_of_a_dead_process_of_an_older_version_is_removed(tmp_path: Path) -> None:
    (tmp_path / "probe-999999999").touch()
    assert remove_leftovers(tmp_path) == 1


def test_what_a_process_left_that_has_ended_and_was_not_asked_for_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        owner = f"{atomic._host()}-{child.pid}-{atomic._start_of(child.pid)}"
        assert child.stdout is not None
        child.stdout.read()  # until it ends
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / f".record.json.{owner}.tmp").touch()
        assert remove_leftovers(tmp_path) == 1
