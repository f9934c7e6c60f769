"""Reading skips and names what is not whole; derived files are rebuilt from what is."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.metrics.record import PointRecord
from harness.store import ForeignFileError, StoreVersionError
from harness.store.commit import commit_failure, commit_point, read_store, read_table
from harness.store.manifest import Manifest, SweepPoint, read_manifest, with_report, write_manifest
from harness.store.summary import flatten, write_summary

TABLES = {"steps": {"step": [0]}}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    commit_point(tmp_path, "aa", PointRecord(simulated={"value": 1}), TABLES)
    commit_point(tmp_path, "bb", PointRecord(simulated={"value": 2}), TABLES)
    return tmp_path


def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert read_store(tmp_path / "none").records == {}


def test_a_truncated_record_is_skipped_and_named(store: Path) -> None:
    file = store / "points/bb/record.json"
    file.write_bytes(file.read_bytes()[:20])
    content = read_store(store)
    assert set(content.records) == {"aa"}
    assert len(content.problems) == 1
    assert str(file) in content.problems[0]
    assert "truncated or not JSON" in content.problems[0]


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 1, "fingerprint": "other"}', '{"hello": "world"}'])
def test_a_foreign_record_is_skipped_and_named(store: Path, text: str) -> None:
    (store / "points/bb/record.json").write_text(text)
    content = read_store(store)
    assert set(content.records) == {"aa"}
    assert "points/bb/record.json: not a record" in content.problems[0]


def test_a_record_whose_table_is_gone_does_not_count(store: Path) -> None:
    (store / "points/aa/steps.parquet").unlink()
    content = read_store(store)
    assert set(content.records) == {"bb"}
    assert "its table steps.parquet is missing" in content.problems[0]


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({}, "its section 'config' is missing"),
        ({"config": {}, "measured": 3}, "its section 'measured' is no table of keys and values"),
        ({"config": {}, "tables": ["../aa/steps"]}, "its section 'tables' is no list of names"),
        ({"config": {}, "tables": 3}, "its section 'tables' is no list of names"),
        ({"config": {}, "overrides": "a=1"}, "its section 'overrides' is no list of texts"),
        (
            {"config": {}, "comparison": [1]},
            "its section 'comparison' is no list of rows with metric, error, spread",
        ),
    ],
)
def test_a_record_that_no_reader_could_use_is_skipped_and_says_why(
    store: Path, sections: dict[str, object], wrong: str
) -> None:
    record = {"schema": 1, "fingerprint": "bb", **sections}
    (store / "points/bb/record.json").write_text(json.dumps(record))
    content = read_store(store)
    assert set(content.records) == {"aa"}
    assert content.problems[0].endswith(f"not a record of a finished point: {wrong}")


@pytest.mark.parametrize("kept", [0, 3, 30])
def test_a_record_whose_table_was_cut_does_not_count(store: Path, kept: int) -> None:
    file = store / "points/aa/steps.parquet"
    file.write_bytes(file.read_bytes()[:kept])
    content = read_store(store)
    assert set(content.records) == {"bb"}
    assert "its table steps.parquet is truncated" in content.problems[0]


def test_a_table_that_was_zeroed_inside_does_not_count(store: Path) -> None:
    file = store / "points/aa/steps.parquet"
    data = bytearray(file.read_bytes())
    data[40:60] = bytes(20)
    file.write_bytes(data)
    content = read_store(store)
    assert set(content.records) == {"bb"}
    assert "its table steps.parquet does not match its digest" in content.problems[0]


def test_a_record_that_was_edited_does_not_count(store: Path) -> None:
    file = store / "points/aa/record.json"
    file.write_bytes(file.read_bytes().replace(b'"value": 1', b'"value": 7'))
    content = read_store(store)
    assert set(content.records) == {"bb"}
    assert "so it was changed after it was written" in content.problems[0]


@pytest.mark.parametrize("number", ["18446744073709551616", "NaN", "Infinity", "1" * 5000])
def test_a_record_with_a_number_that_no_table_holds_is_skipped_and_the_others_are_reported(
    store: Path, number: str
) -> None:
    (store / "points/bb/record.json").write_text(
        f'{{"schema": 1, "fingerprint": "bb", "config": {{}}, "value": {number}}}'
    )
    content = read_store(store)
    assert set(content.records) == {"aa"}
    assert str(store / "points/bb/record.json") in content.problems[0]
    assert pq.read_table(write_summary(store, content.records.values())).num_rows == 1


def test_a_record_of_an_older_version_has_no_digest_and_counts(store: Path) -> None:
    record = {"schema": 1, "fingerprint": "bb", "tables": ["steps"], "config": {}}
    (store / "points/bb/record.json").write_text(json.dumps(record))
    assert set(read_store(store).records) == {"aa", "bb"}


def test_files_that_are_no_points_are_left_alone(store: Path) -> None:
    (store / "points/README").write_text("mine")
    assert set(read_store(store).records) == {"aa", "bb"}


def test_another_schema_version_is_an_error_with_a_hint(store: Path) -> None:
    (store / "points/aa/record.json").write_text(json.dumps({"schema": 99, "fingerprint": "aa"}))
    with pytest.raises(
        StoreVersionError, match=r"schema 99, this PageTwin reads 1; use the version that wrote it"
    ):
        read_store(store)


def test_failures_are_kept_apart_from_records(store: Path) -> None:
    commit_failure(store, "cc", {"error": "boom"})
    content = read_store(store)
    assert content.failures["cc"]["error"] == "boom"
    assert "cc" not in content.records


def test_a_truncated_table_is_named(store: Path) -> None:
    file = store / "points/aa/steps.parquet"
    file.write_bytes(file.read_bytes()[:30])
    with pytest.raises(ForeignFileError, match=r"steps\.parquet: cannot be read"):
        read_table(store, "aa", "steps")


def test_a_manifest_is_read_back_with_its_report(tmp_path: Path) -> None:
    manifest = Manifest("x", "python -m harness sweep", ("a=1",), (SweepPoint("aa", ("a=1",)),))
    manifest = with_report(
        manifest, tmp_path, tmp_path / "report/index.html", ["fine"], tmp_path / "summary.parquet"
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert manifest.report == "report/index.html"


def test_a_store_without_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[1]", '{"schema": 1}', "{"])
def test_a_broken_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ForeignFileError, match=r"sweep\.json: truncated or not a PageTwin sweep"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("report", ["/etc/passwd", "../other/index.html", "report/../../x"])
def test_a_manifest_whose_report_lies_outside_the_store_is_refused(tmp_path: Path, report: str) -> None:
    write_manifest(tmp_path, replace(Manifest("x", "python -m harness sweep", (), ()), report=report))
    with pytest.raises(ForeignFileError, match="lies outside the store"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"schema": 2}')
    with pytest.raises(StoreVersionError, match="schema 2"):
        read_manifest(tmp_path)


def test_a_record_becomes_one_row_with_dotted_columns() -> None:
    record = {
        "name": "x",
        "config": {"cache": {"block_size": 8}},
        "overrides": ["a=1", "b=2"],
        "measured": {"runs": [{"m": 1}, {"m": 2}], "median": {"m": 1.5}},
        "comparison": [{"metric": "ttft_p50_s", "error": 0.1}],
    }
    assert flatten(record) == {
        "name": "x",
        "config.cache.block_size": 8,
        "overrides": "a=1 b=2",
        "measured.median.m": 1.5,
        "comparison.ttft_p50_s.error": 0.1,
    }


def test_the_summary_has_one_row_a_point_and_one_type_a_column(tmp_path: Path) -> None:
    configs = [{"a": 1, "b": 1}, {"a": 0.5, "b": "text"}, {"c": None, "b": None}]
    write_summary(tmp_path, [PointRecord(config=config) for config in configs])
    table = pq.read_table(tmp_path / "summary.parquet").to_pydict()
    found = {name: table[f"config.{name}"] for name in "abc"}
    assert found == {"a": [1.0, 0.5, None], "b": ["1", "text", None], "c": [None, None, None]}


def test_the_summary_of_nothing_is_empty(tmp_path: Path) -> None:
    assert pq.read_table(write_summary(tmp_path, [])).num_rows == 0
