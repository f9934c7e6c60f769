"""kill -9 at any moment: what was committed is whole, and the same command does exactly the rest."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tiers import cases, tier

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
SCRIPT = "import sys; import fake_point; fake_point.heed_every_signal(); from harness.cli.main import main; \
sys.exit(main(sys.argv[1:], point=fake_point, report=fake_point))"
POINTS = 24
PATIENCE_S = 300  # a safety net: no test rests on it
KILLS = tier(1, 4)
WORKERS = ["measure=false", "workers=2"]


def command(*words: str) -> list[str]:
    axes = ["trace.name=any", f"workload.seed=range({POINTS})", "cost.cache_dir=."]
    return [sys.executable, "-c", SCRIPT, "sweep", *axes, *words]


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, ROOT))),
            "PYTHONFAULTHANDLER": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def records(folder: Path) -> list[Path]:
    return list(folder.rglob("record.json"))


def runs(folder: Path) -> int:
    """How many runs of points have begun."""
    file = folder / "runs.txt"
    return len(file.read_text().splitlines()) if file.exists() else 0


def let_run(folder: Path, more: int) -> None:
    """Let this many further runs go on; those that begin after them wait."""
    (folder / "limit").write_text(str(runs(folder) + more))


def wait_for_records(folder: Path, count: int, process: "subprocess.Popen[str]") -> None:
    while len(records(folder)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def ended(process: "subprocess.Popen[str]") -> str:
    """What it wrote to standard error. One that does not end shows there where it is."""
    try:
        return process.communicate(timeout=PATIENCE_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        return process.communicate()[1]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


@cases("words", [WORKERS, []], day=1, ids=["workers", "here"])
def test_a_sweep_that_is_killed_finishes_when_it_is_started_again(tmp_path: Path, words: list[str]) -> None:
    dice = random.Random(7)
    for _ in range(KILLS):
        let_run(tmp_path, 5)
        process = start(tmp_path, *words)
        wait_for_records(tmp_path, len(records(tmp_path)) + 2, process)
        time.sleep(dice.uniform(0, 0.05))  # in the middle of whatever it is doing then
        process.kill()
        process.communicate()
        for record in records(tmp_path):
            assert json.loads(record.read_text())["fingerprint"] == record.parent.name
            assert pq.read_table(record.parent / "steps.parquet").num_rows == 1000
    before, ran = len(records(tmp_path)), runs(tmp_path)
    assert 2 * KILLS <= before <= 5 * KILLS < POINTS
    (tmp_path / "limit").unlink()
    last = start(tmp_path, *words)
    err = ended(last)
    assert last.returncode == 0, err
    assert len(records(tmp_path)) == POINTS
    assert runs(tmp_path) == ran + POINTS - before
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.nightly
def test_workers_die_with_the_sweep_that_was_killed(tmp_path: Path) -> None:
    let_run(tmp_path, 2)
    process = start(tmp_path, *WORKERS)
    wait_for_records(tmp_path, 1, process)
    workers = children(process.pid)
    assert workers
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


@cases(
    ("words", "name"),
    [(words, name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for words in ([], WORKERS)],
    day=((WORKERS, signal.SIGINT),),
)
def test_a_stopped_sweep_can_go_on_and_says_so(
    tmp_path: Path, words: list[str], name: signal.Signals
) -> None:
    let_run(tmp_path, 3)
    process = start(tmp_path, *words)
    wait_for_records(tmp_path, 2, process)
    os.killpg(process.pid, name)  # as a terminal does: to the whole group
    err = ended(process)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "resource_tracker" not in err
    assert f"of {POINTS} points are done and kept in results/default" in err
    assert "Go on with the same command: python -m harness sweep trace.name=any" in err
    assert list(tmp_path.rglob("*.tmp")) == []
