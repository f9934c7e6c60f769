"""The memory of a point is estimated before anything is read or drawn, and a point that cannot fit is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import memory
from harness.config.memory import check_memory, point_memory, rows_at_most, usable_memory, workers_that_fit
from harness.config.schema import RunConfig, TraceFormat, WorkloadConfig
from harness.store.commit import parquet_bytes

GB = 10**9


def point(requests: int, **changes: object) -> RunConfig:
    return replace(RunConfig(workload=WorkloadConfig(num_requests=requests)), **changes)  # type: ignore[arg-type]


def test_the_memory_of_a_point_grows_with_its_requests() -> None:
    assert 5 * GB < point_memory(point(10**6)) < 10 * GB


def test_a_point_without_rows_takes_less() -> None:
    rows = point(10**6)
    assert point_memory(replace(rows, replay=replace(rows.replay, records=False))) < point_memory(rows) / 2


@pytest.mark.parametrize(("requests", "records", "peak"), [(50_000, True, 586), (100_000, False, 409)])
def test_the_estimate_is_at_most_half_above_what_was_measured(
    requests: int, records: bool, peak: int
) -> None:
    config = point(requests)
    found = point_memory(replace(config, replay=replace(config.replay, records=records)))
    assert peak < found / 10**6 < 1.5 * peak


def test_a_point_that_cannot_fit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 24 * GB)
    (error,) = check_memory(point(10**7))
    assert str(error) == (
        "workload.num_requests: found 10,000,000, which take about 51 GB; this machine has 24 GB, of which 80% may be "
        "used; take fewer, or set replay.records=false"
    )


def test_a_point_that_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 24 * GB)
    assert list(check_memory(point(10**6))) == []


def test_a_limit_above_the_rows_of_a_file_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 24 * GB)
    config = point(10**7)
    assert list(check_memory(replace(config, trace=replace(config.trace, format=TraceFormat.azure)))) == []


def test_no_more_workers_start_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 24 * GB)
    assert workers_that_fit(point(64), 8) == 8
    assert workers_that_fit(point(10**6), 8) == 2
    assert workers_that_fit(point(400_000), 8) == 7


def test_a_control_group_lowers_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "limit"
    limit.write_text("1000000000\n")
    monkeypatch.setattr(memory, "_LIMITS", (limit, tmp_path / "none"))
    assert usable_memory() == GB
    limit.write_text("max\n")
    assert usable_memory() > GB


def in_file(file: Path, requests: int | None) -> RunConfig:
    config = RunConfig(workload=WorkloadConfig(num_requests=requests))
    return replace(config, trace=replace(config.trace, format=TraceFormat.azure, path=str(file)))


def test_a_trace_in_a_file_counts_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("head\n" + "row\n" * 99_999)
    assert point_memory(in_file(file, None)) == point_memory(point(100_000))


def test_a_limit_below_the_lines_of_a_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("row\n" * 5_000)
    assert point_memory(in_file(file, 64)) == point_memory(point(64))


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("a\nb")
    assert rows_at_most(str(tmp_path / "trace.csv")) == 2


def test_the_files_of_a_folder_count_together(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("row\n" * 3)
    assert rows_at_most(str(tmp_path)) == 6


def test_rows_of_parquet_count(tmp_path: Path) -> None:
    file = tmp_path / "trace.parquet"
    file.write_bytes(parquet_bytes({"a": list(range(1234))}))
    assert rows_at_most(str(file)) == 1234


def test_a_file_that_grew_is_counted_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("row\n")
    first = rows_at_most(str(file))
    file.write_text("row\n" * 2)
    assert (first, rows_at_most(str(file))) == (1, 2)


def test_a_file_whose_requests_cannot_fit_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("row\n" * 200_000)
    monkeypatch.setattr(memory, "machine_memory", lambda: GB)
    (error,) = check_memory(in_file(file, None))
    assert f"null, and '{file}' has 200,000, which take about 1 GB" in str(error)


def test_a_device_without_an_end_is_not_read() -> None:
    assert rows_at_most("/dev/zero") == 0
