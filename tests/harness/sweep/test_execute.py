"""Executing: failures are kept, a dying worker takes no other point along, an interrupt keeps what is done."""

import io
import json
import os
import signal
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_point
import pytest
from rich.console import Console

from harness.store import StoreError
from harness.store.commit import read_store, read_table
from harness.sweep.execute import SweepOutcome, execute
from harness.sweep.plan import SweepPlan, plan_sweep, sweep_request
from harness.sweep.progress import TimeLeft, TimeModel, reporting

LEFT = TimeLeft(TimeModel({}, 0), (), 1)


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., SweepPlan]:
    """Plans a sweep into `tmp_path/store`, with notes of the runs in `tmp_path`."""

    def make(*overrides: str) -> SweepPlan:
        own = [f"out={tmp_path}/store", f"cost.cache_dir={tmp_path}", *overrides]
        return plan_sweep(sweep_request(own), fake_point)

    return make


Staged = Generator[None, None, fake_point.Result]


class Stages:
    """Runs fake points in stages, and notes each run as `seed.number`."""

    def __init__(self, fails: str = "", interrupted: str = "", full: str = "") -> None:
        self.runs: list[str] = []
        self._fails, self._interrupted, self._full = fails, interrupted, full

    def __call__(self, config: Any, *, progress: Any = None, kept: Any = None) -> Staged:
        for number in range(config.replay.repeats):
            yield
            run = f"{config.workload.seed}.{number + 1}"
            if run == self._fails:
                raise RuntimeError("the run is broken")
            if run == self._interrupted:
                raise KeyboardInterrupt
            if run == self._full:
                raise StoreError("cannot write: the disk is full")
            self.runs.append(run)
        return fake_point.run_point(config, progress=progress)


@dataclass(frozen=True)
class Staging:
    """Runs points in these stages."""

    point_stages: Stages
    run_point = staticmethod(fake_point.run_point)


def run_staged(plan: SweepPlan, stages: Stages) -> SweepOutcome:
    """Execute all points of a plan in stages."""
    return execute(plan, plan.points, Staging(stages), console=Console(file=io.StringIO()))


def run(plan: SweepPlan) -> tuple[SweepOutcome, str]:
    """Execute all points of a plan, logging to a string."""
    text = io.StringIO()
    outcome = execute(plan, plan.points, fake_point, console=Console(file=text, width=200))
    return outcome, text.getvalue()


def test_every_point_is_committed_with_its_tables(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("workload.seed=1,2,3")
    outcome, _ = run(sweep)
    assert outcome == SweepOutcome(3, (), interrupted=False)
    for point in sweep.points:
        record = read_store(sweep.out).records[point.fingerprint]
        assert record.simulated["metric"] == point.config.workload.seed
        assert record.overrides == list(point.overrides)
        assert record.config["cache"]["policy"] == "paged"
        assert len(read_table(sweep.out, point.fingerprint, "steps")["step"]) == 1000


def test_a_failing_point_is_kept_with_its_traceback_and_others_run(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("trace.name=fail,ok")
    outcome, log = run(sweep)
    (failed,) = outcome.failed
    assert outcome.done == 1
    assert failed.error == "RuntimeError: the point is broken"
    assert any("raise RuntimeError" in line for line in json.loads(failed.file.read_text())["traceback"])
    assert "FAILED: RuntimeError: the point is broken" in log


@pytest.mark.nightly
def test_simulated_points_run_in_worker_processes(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("measure=false", "workers=2", "trace.name=ok,fail", "workload.seed=1,2")
    outcome, _ = run(sweep)
    assert outcome.done == 2
    assert {failed.error for failed in outcome.failed} == {"RuntimeError: the point is broken"}


def test_a_worker_that_dies_fails_its_own_point_only(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("measure=false", "workers=2", "trace.name=die,ok", "workload.seed=1,2")
    outcome, _ = run(sweep)
    assert outcome.done == 2
    assert [failed.label.split()[0] for failed in outcome.failed] == ["trace.name=die"] * 2
    assert "its process died" in outcome.failed[0].error


def test_an_interrupt_keeps_what_is_done(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("trace.name=ok,interrupt,late")
    outcome, _ = run(sweep)
    assert outcome == SweepOutcome(1, (), interrupted=True)
    assert len(read_store(sweep.out).records) == 1


@pytest.mark.nightly
def test_workers_are_handed_a_few_points_ahead_and_not_all(
    plan: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = plan("measure=false", "workers=2", "workload.seed=range(30)")
    waiting: list[int] = []
    submit = ProcessPoolExecutor.submit

    def count(self: ProcessPoolExecutor, *arguments: Any) -> Any:
        waiting.append(len(self._pending_work_items))
        return submit(self, *arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", count)
    outcome, _ = run(sweep)
    assert outcome.done == 30
    assert max(waiting) < 10


@pytest.mark.nightly
def test_an_interrupt_does_not_wait_for_workers(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("measure=false", "workers=2", "workload.seed=range(20)")
    limit = Path(sweep.points[0].config.cost.cache_dir) / "limit"
    limit.write_text("4")  # the workers are in the middle of the fifth point and the sixth, and stay there
    text = io.StringIO()
    console = Console(file=text)

    def interrupt_soon(line: str) -> int:
        if "[4/20]" in line:
            os.kill(os.getpid(), signal.SIGINT)
        return len(line)

    text.write = interrupt_soon  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        outcome = execute(sweep, sweep.points, fake_point, console=console)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.interrupted
    assert outcome.done <= 4
    assert len(read_store(sweep.out).records) == 4


def test_a_full_disk_stops_the_sweep_and_keeps_the_points_before(
    plan: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = plan("workload.seed=1,2,3")
    commit = "harness.sweep.execute.commit_point"
    import harness.sweep.execute as module

    real, count = module.commit_point, iter(range(3))

    def fill_up(*arguments: object) -> None:
        if next(count) == 1:
            raise StoreError("cannot write: the disk is full")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, fill_up)
    with pytest.raises(StoreError, match="disk is full"):
        run(sweep)
    assert list(read_store(sweep.out).records) == [sweep.points[0].fingerprint]


def test_a_run_that_cannot_be_kept_stops_the_sweep_and_fails_no_point(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("workload.seed=1,2", "measure=true", "replay.repeats=2")
    with pytest.raises(StoreError, match="disk is full"):
        run_staged(sweep, Stages(full="2.1"))
    assert read_store(sweep.out).failures == {}


@pytest.mark.nightly
def test_the_log_has_a_line_for_each_tenth_that_is_passed(plan: Callable[..., SweepPlan]) -> None:
    _, log = run(plan("workload.seed=1,2", "measure=false"))
    assert [line.partition(",")[0] for line in log.splitlines()] == [
        "[1/2] 50 % of the work done",
        "[2/2] 100 % of the work done",
    ]


def test_a_terminal_shows_points_done_and_the_running_points_requests(plan: Callable[..., SweepPlan]) -> None:
    sweep, text = plan("workload.seed=1,2"), io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)
    with reporting(len(sweep.points), 0, console, LEFT) as reporter:
        reporter.starts(sweep.points[0])
        reporter.ends(sweep.points[0], None)
        reporter.starts(sweep.points[1])
        reporter.request("measuring", 12, 64)
    assert "12/64 requests, measuring  workload.seed=2" in text.getvalue()
    assert "1/2" in text.getvalue()


@pytest.mark.parametrize("width", [34, 80])
def test_counts_show_on_a_narrow_terminal_whatever_the_points_name(
    plan: Callable[..., SweepPlan], width: int
) -> None:
    sweep = plan("workload.seed=1,2", "workload.prefix_share=0.123456789", "decoding.beam_width=1,2")
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    with reporting(40, 17, console, LEFT) as reporter:
        reporter.starts(sweep.points[0])
        reporter.request("measuring, run 1 of 3", 5, 48)
    last = [line for line in text.getvalue().replace("\r", "\n").splitlines() if "5/48" in line][-1]
    assert "17/40" in last
    assert "5/48 requests" in last


def test_the_runs_of_measured_points_take_turns(plan: Callable[..., SweepPlan]) -> None:
    stages = Stages()
    sweep = plan("workload.seed=1,2,3", "replay.repeats=2")
    assert run_staged(sweep, stages) == SweepOutcome(3, (), interrupted=False)
    assert stages.runs == ["1.1", "2.1", "3.1", "1.2", "2.2", "3.2"]
    assert len(read_store(sweep.out).records) == 3


def test_without_spread_a_point_ends_before_the_next_begins(plan: Callable[..., SweepPlan]) -> None:
    stages = Stages()
    run_staged(plan("workload.seed=1,2", "replay.repeats=2", "execute.spread_s=0"), stages)
    assert stages.runs == ["1.1", "1.2", "2.1", "2.2"]


def test_points_of_another_model_are_not_open_together(plan: Callable[..., SweepPlan]) -> None:
    stages = Stages()
    run_staged(plan("model.seed=5,6", "workload.seed=1,2", "replay.repeats=2"), stages)
    assert stages.runs == ["1.1", "2.1", "1.2", "2.2"] * 2


def test_points_are_open_together_until_their_runs_take_the_spread(
    plan: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10**6))  # each look at the clock is a second later, so that each run takes one
    monkeypatch.setattr("harness.sweep.execute.time.perf_counter", lambda: float(next(now)))
    stages = Stages()
    run_staged(plan("workload.seed=1,2,3,4,5", "replay.repeats=2", "execute.spread_s=3.5"), stages)
    assert stages.runs == ["1.1", "2.1", "1.2", "2.2", "3.1", "4.1", "3.2", "4.2", "5.1", "5.2"]


def test_a_point_is_said_to_take_its_own_seconds(
    plan: Callable[..., SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr("harness.sweep.execute.time.perf_counter", lambda: float(next(now)))
    sweep = plan("workload.seed=1,2,3", "replay.repeats=2")
    run_staged(sweep, Stages())
    records = read_store(sweep.out).records
    assert [records[point.fingerprint].seconds["point"] for point in sweep.points] == [3.0] * 3


def test_a_run_that_fails_leaves_the_other_points_open(plan: Callable[..., SweepPlan]) -> None:
    stages = Stages(fails="2.2")
    sweep = plan("workload.seed=1,2,3", "replay.repeats=3")
    outcome = run_staged(sweep, stages)
    assert [failed.error for failed in outcome.failed] == ["RuntimeError: the run is broken"]
    assert stages.runs == ["1.1", "2.1", "3.1", "1.2", "3.2", "1.3", "3.3"]
    assert len(read_store(sweep.out).records) == 2


def test_an_interrupt_in_the_last_round_keeps_the_points_that_ended(plan: Callable[..., SweepPlan]) -> None:
    sweep = plan("workload.seed=1,2,3", "replay.repeats=2")
    assert run_staged(sweep, Stages(interrupted="2.2")) == SweepOutcome(1, (), interrupted=True)
    assert read_store(sweep.out).records.keys() == {sweep.points[0].fingerprint}
