"""A survey of a store is kept, and a point is read again when one of its files has changed."""

import os
from pathlib import Path

import pytest

from harness.metrics.record import PointRecord
from harness.store import StoreError
from harness.store import survey as module
from harness.store.commit import Layout, StoreContent, commit_failure, commit_point, essentials, read_store
from harness.store.survey import SURVEY, survey

NAMES = [f"{number:02d}" for number in range(6)]


def record(seconds: float) -> PointRecord:
    config = {"measure": False, "cache": {"policy": "paged", "block_size": 8}, "workload": {"seed": 1}}
    return PointRecord(config=config, trace={"requests": 4, "digest": "x"}, seconds={"point": seconds})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six points, which is much here, and files that count as settled at once."""
    monkeypatch.setattr(module, "_WORTH_KEEPING", 3)
    monkeypatch.setattr(module, "_SETTLED_NS", -(10**12))
    for number, name in enumerate(NAMES):
        commit_point(tmp_path, name, record(0.5 + number), {"steps": {"a": [1, 2]}})
    return tmp_path


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The points that are read from now on."""
    names: list[str] = []
    real = module.commit.read_point

    def read(root: Path, name: str, content: StoreContent, keep: None) -> None:
        names.append(name)
        real(root, name, content, keep)

    monkeypatch.setattr(module.commit, "read_point", read)
    return names


def test_a_survey_holds_the_essentials_of_every_record(store: Path) -> None:
    assert survey(store).records == read_store(store, essentials).records


def test_points_that_did_not_change_are_not_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = survey(store)
    names = reads(monkeypatch)
    assert survey(store).records == first.records
    assert names == []


def test_a_point_that_was_run_again_is_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey(store)
    commit_point(store, "02", record(99.0), {"steps": {"a": [1, 2]}})
    names = reads(monkeypatch)
    assert survey(store).records["02"].seconds == {"point": 99.0}
    assert names == ["02"]


def test_a_table_damaged_after_the_survey_is_noticed(store: Path) -> None:
    survey(store)
    table = Layout(store).table("03", "steps")
    table.write_bytes(table.read_bytes()[:-9] + b"xxxxxPAR1")
    found = survey(store)
    assert "03" not in found.records
    assert "does not match its digest" in found.problems[0]


def test_a_table_of_equal_size_and_time_of_change_is_noticed(store: Path) -> None:
    survey(store)
    table = Layout(store).table("03", "steps")
    before = table.stat()
    table.write_bytes(table.read_bytes()[:-9] + b"xxxxxPAR1")
    os.utime(table, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "03" not in survey(store).records


def test_a_point_without_its_table_is_not_finished(store: Path) -> None:
    survey(store)
    Layout(store).table("03", "steps").unlink()
    assert "03" not in survey(store).records


def test_a_point_that_has_gone_is_not_reported(store: Path) -> None:
    survey(store)
    Layout(store).point("05").rename(store / "elsewhere")
    assert list(survey(store).records) == NAMES[:5]


def test_a_failure_is_named_beside_kept_points(store: Path) -> None:
    survey(store)
    commit_failure(store, "zz", {"label": "a=1", "error": "broken", "traceback": ["x"] * 1000})
    assert survey(store).failures == {"zz": {"label": "a=1", "error": "broken"}}


def test_files_that_may_still_change_within_a_tick_of_the_clock_are_read_again(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_NS", 10**12)
    survey(store)
    names = reads(monkeypatch)
    survey(store)
    assert names == NAMES


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more PAR1", b"x" * 100])
def test_a_damaged_survey_is_written_anew(
    store: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / SURVEY).write_bytes(content)
    assert list(survey(store).records) == NAMES
    names = reads(monkeypatch)
    survey(store)
    assert names == []


def test_a_store_that_cannot_be_written_is_read_all_the_same(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path, files: object) -> None:
        raise StoreError("cannot write: the file system is read-only")

    monkeypatch.setattr(module, "write_files", refuse)
    assert list(survey(store).records) == NAMES
    assert "read-only" in capsys.readouterr().err


@pytest.mark.nightly
def test_points_that_are_read_in_several_processes_are_the_same(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = survey(store).records
    (store / SURVEY).unlink()
    monkeypatch.setattr(module, "_WORTH_WORKERS", 1)
    monkeypatch.setattr(module, "_PART", 2)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    assert survey(store).records == alone
