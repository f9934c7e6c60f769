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

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = "import sys; import fake_point; from harness.cli.main import main; \
sys.exit(main(sys.argv[1:], point=fake_point, report=fake_point))"
POINTS = 24


def command(*words: str) -> list[str]:
    axes = ["trace.name=slow", f"workload.seed=range({POINTS})", "cost.cache_dir=."]
    return [sys.executable, "-c", SCRIPT, "sweep", *axes, *words]


def heed_every_signal() -> None:
    """Undo what a parent run under nohup, or in a shell's background, would hand down: ignored signals."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler if name is signal.SIGINT else signal.SIG_DFL)


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_every_signal,
    )


def wait_for_records(folder: Path, count: int, process: "subprocess.Popen[str]") -> None:
    while len(list(folder.rglob("record.json"))) < count and process.poll() is None:
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["measure=false", "workers=2"]], ids=["here", "workers"])
def test_a_sweep_that_is_killed_again_and_again_finishes(tmp_path: Path, words: list[str]) -> None:
    dice = random.Random(7)
    for kill in range(4):
        process = start(tmp_path, *words)
        wait_for_records(tmp_path, 4 * kill + 2, process)
        time.sleep(dice.uniform(0, 0.15))
        process.kill()
        process.communicate()
        for record in tmp_path.rglob("record.json"):
            assert json.loads(record.read_text())["fingerprint"] == record.parent.name
            assert pq.read_table(record.parent / "steps.parquet").num_rows == 1000
    before = len(list(tmp_path.rglob("record.json")))
    assert 8 <= before < POINTS
    ran = len((tmp_path / "runs.txt").read_text().splitlines())
    last = start(tmp_path, *words)
    last.communicate()
    assert last.returncode == 0
    assert len(list(tmp_path.rglob("record.json"))) == POINTS
    assert len((tmp_path / "runs.txt").read_text().splitlines()) == ran + POINTS - before
    assert list(tmp_path.rglob("*.tmp")) == []


def test_workers_die_with_the_sweep_that_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "measure=false", "workers=2")
    wait_for_records(tmp_path, 1, process)
    workers = children(process.pid)
    assert workers
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("words", [[], ["measure=false", "workers=2"]], ids=["here", "workers"])
def test_a_stopped_sweep_can_go_on_and_says_so(
    tmp_path: Path, words: list[str], name: signal.Signals
) -> None:
    process = start(tmp_path, *words)
    wait_for_records(tmp_path, 2, process)
    # a hang-up also kills multiprocessing's own helper, which complains to a terminal that is gone: spare it
    (os.kill if name is signal.SIGHUP else os.killpg)(process.pid, name)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"of {POINTS} points are done and kept in results/default" in err
    assert "Go on with the same command: python -m harness sweep trace.name=slow" in err
    assert list(tmp_path.rglob("*.tmp")) == []
