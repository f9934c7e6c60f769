"""A measured run is kept as it ends, whole, and a later start goes on behind it."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from point_cases import small_config
from rich.console import Console

from harness.config.schema import CostKind, RunConfig
from harness.measure import engine
from harness.metrics.log import RunLog
from harness.point import PointResult, PointSession
from harness.point.kept_runs import read_runs
from harness.store.commit import Layout
from harness.sweep.execute import execute
from harness.sweep.plan import plan_sweep, sweep_request

REPEATS = 3


def config_of(folder: Path, beams: int = 1) -> RunConfig:
    config = small_config(folder)
    config.cost.kind = CostKind.roofline  # without a calibration: the first start's warm-up is the reference
    config.decoding.beam_width = beams
    return dataclasses.replace(config, replay=dataclasses.replace(config.replay, repeats=REPEATS))


def stopped_after(runs: int, config: RunConfig, folder: Path) -> None:
    """A start that ends, as killed, after so many runs."""
    stages = PointSession().point_stages(config, kept=folder)
    for _ in range(runs + 1):
        next(stages)
    stages.close()


def finished(config: RunConfig, folder: Path | None) -> PointResult:
    stages = PointSession().point_stages(config, kept=folder)
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: PointResult = end.value
            return result


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the requests of each run on the engine."""
    seen: list[int] = []
    measure = engine.measure

    def noted(point: Any, **options: Any) -> Any:
        seen.append(len(point.trace.requests))
        return measure(point, **options)

    monkeypatch.setattr(engine, "measure", noted)
    return seen


@pytest.mark.nightly
def test_a_later_start_takes_the_runs_that_are_left(tmp_path: Path, taken: list[int]) -> None:
    config = config_of(tmp_path)
    stopped_after(2, config, tmp_path)
    before = len(taken)
    record = finished(config, tmp_path).record
    assert len(taken) - before == 2  # a warm-up, and the third run
    assert len(record.measured["runs"]) == REPEATS
    assert record.environment["runs_of_earlier_starts"] == 2


@pytest.mark.nightly
def test_runs_across_starts_make_the_tables_of_one_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, beams=3)
    stopped_after(2, config, tmp_path)
    across, at_once = finished(config, tmp_path), finished(config, None)
    assert across.record.levels["counts"]["identical"] is True  # plans of kept runs too, step by step
    assert across.tables.keys() == at_once.tables.keys()
    for name, table in at_once.tables.items():
        assert table.keys() == across.tables[name].keys()
        assert all(across.tables[name][key].dtype == column.dtype for key, column in table.items())


def test_a_run_is_read_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    measure = engine.measure
    monkeypatch.setattr(engine, "measure", lambda *a, **k: runs.append(measure(*a, **k)) or runs[-1])
    stopped_after(1, config_of(tmp_path, beams=3), tmp_path)
    was, now = runs[-1], read_runs(tmp_path)[0].run
    for field in dataclasses.fields(RunLog):
        one, other = getattr(was.log, field.name), getattr(now.log, field.name)
        if isinstance(one, dict):
            assert all(np.array_equal(one[key], other[key], equal_nan=True) for key in one)
        else:
            assert np.array_equal(one, other)
    for name in ("digests", "results", "drafted", "step_ns", "parents"):
        assert getattr(was.recording, name) == getattr(now.recording, name)
    assert np.array_equal(was.recording.features, now.recording.features)
    assert (was.audits, was.yardstick_s) == (now.audits, now.yardstick_s)


@pytest.mark.nightly
def test_a_damaged_run_is_measured_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    stopped_after(2, config, tmp_path)
    data = bytearray((tmp_path / "1.run").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "1.run").write_bytes(data)
    assert len(read_runs(tmp_path)) == 1
    assert finished(config, tmp_path).record.environment["runs_of_earlier_starts"] == 1


@pytest.mark.nightly
def test_a_sweep_that_is_ended_behind_each_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two points that are open together, of three runs each: every start that lets one run end gains that run."""
    words = [
        "cost=roofline",
        "replay.repeats=3",
        "workload.seed=1,2",
        "workload.num_requests=8",
        "model.layers=1",
    ]
    words += [
        "workload.length_scale=0.05",
        "workload.oversize=drop",
        f"out={tmp_path}/s",
        "cost.bounds=false",
    ]
    sweep = plan_sweep(sweep_request(words), PointSession())
    measure, left = engine.measure, [0]

    def ended_behind_one(point: Any, **options: Any) -> Any:
        if len(point.trace.requests) == 8:  # no warm-up
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return measure(point, **options)

    monkeypatch.setattr(engine, "measure", ended_behind_one)
    starts = 0
    while todo := [one for one in sweep.points if not Layout(sweep.out).record(one.fingerprint).exists()]:
        starts, left[0] = starts + 1, 1
        execute(sweep, todo, PointSession(), console=Console(file=io.StringIO()))
        assert starts <= 6
    assert starts == 6
    assert not [*sweep.out.glob(".open/*/*")]
