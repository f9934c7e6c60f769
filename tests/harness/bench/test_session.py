"""A benchmark session: what ran comes back with its samples; what failed says why."""

import json
import sys
from pathlib import Path

import pytest
from pytest_benchmark.utils import load_timer

from harness.bench import results
from harness.bench.results import BenchError, run_session
from harness.bench.runner import CLOCK

TIMED = """
import time
from harness.bench.results import read_settings

def test_sleep(benchmark):
    settings = read_settings()
    benchmark.group = "sleeping"
    benchmark.extra_info["bytes"] = settings["bytes"]
    benchmark.pedantic(time.sleep, args=(settings["seconds"],), rounds=3)
"""


def bench_file(folder: Path, text: str) -> Path:
    file = folder / "timings.py"
    file.write_text(text)
    return file


@pytest.mark.nightly
def test_a_session_returns_every_sample_and_what_the_benchmark_said(tmp_path: Path) -> None:
    file = bench_file(tmp_path, TIMED)
    timing = run_session(file, {"seconds": 0.002, "bytes": 7}, tmp_path / "out" / "sleep.json")[0]
    assert (timing.name, timing.group, timing.extra) == ("test_sleep", "sleeping", {"bytes": 7})
    assert len(timing.samples_s) == 3
    assert 0.002 <= min(timing.samples_s) <= timing.median_s
    assert json.loads((tmp_path / "out" / "sleep.json").read_text())["benchmarks"][0]["stats"]["rounds"] == 3


def test_the_end_of_a_failed_session_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [sys.executable, "-c", "print('assert equal == unequal'); raise SystemExit(1)"]
    monkeypatch.setattr(results, "_command", lambda *_: fails)
    with pytest.raises(BenchError, match=r"exit code 1\):\nassert equal == unequal"):
        run_session(bench_file(tmp_path, ""), {}, tmp_path / "out.json")


@pytest.mark.nightly
def test_a_failed_benchmark_is_an_error_with_its_reason(tmp_path: Path) -> None:
    file = bench_file(
        tmp_path, "def test_wrong(benchmark):\n    benchmark(lambda: 1)\n    assert 'equal' == 'unequal'"
    )
    with pytest.raises(BenchError, match="'equal' == 'unequal'"):
        run_session(file, {}, tmp_path / "out.json")


@pytest.mark.nightly
def test_a_session_without_benchmarks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="exit code 5"):
        run_session(bench_file(tmp_path, ""), {}, tmp_path / "out.json")


def test_pytest_benchmark_finds_the_clock_by_the_name_that_it_prints() -> None:
    assert str(load_timer(str(load_timer(CLOCK)))) == CLOCK
