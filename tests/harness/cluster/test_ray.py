"""`execute=ray` on a real cluster of two nodes: a lost node's points run again, and the driver alone commits."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_drive import ROOT, SUPPORT, Sweep

ray = pytest.importorskip("ray", reason="Ray is not installed: pagetwin[ray]")

pytestmark = pytest.mark.ray
POINTS = 12
ONCE = Counter(f"any {seed}" for seed in range(POINTS))


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Ray's cluster replaces the handler of SIGTERM; the next tests get theirs back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cluster(sigterm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without cores, and two nodes of two cores; each has a raylet of its own."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (SUPPORT, ROOT, ROOT / "kernels"))))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.nodes = [made.add_node(num_cpus=2) for _ in range(2)]
    made.wait_for_nodes()
    yield made
    made.shutdown()


def sweep_of(folder: Path, *words: str) -> Sweep:
    return Sweep(folder, "trace.name=any", f"workload.seed=range({POINTS})", "execute=ray", *words)


def test_a_sweep_finishes_on_two_nodes_and_runs_each_point_once(cluster: Any, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, f"execute.address={cluster.address}")
    assert sweep.finish() == 0, sweep.said
    assert sweep.runs() == ONCE
    assert len(sweep.records()) == POINTS
    assert "4 cores" in sweep.said


def test_points_of_a_node_that_is_lost_run_again(cluster: Any, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, f"execute.address={cluster.address}")
    sweep.let_run(4)
    driver = sweep.start()
    sweep.wait_for_runs(8, driver)  # four have ended, two more run on each node
    cluster.remove_node(cluster.nodes[0], allow_graceful=False)
    sweep.wait_until("a worker was lost", driver)
    sweep.let_all_run()
    assert driver.wait() == 0, sweep.said
    assert len(sweep.records()) == POINTS
    assert set(sweep.runs()) == set(ONCE)
    assert sweep.runs().total() == POINTS + 2


def test_a_killed_driver_comes_back_and_does_the_rest(cluster: Any, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, f"execute.address={cluster.address}")
    sweep.let_run(5)
    driver = sweep.start()
    sweep.wait_for_records(5, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    kept = {file.parent.name for file in sweep.records()}
    sweep.let_all_run()
    assert sweep.finish() == 0, sweep.said
    assert len(sweep.records()) == POINTS
    assert len(kept) == 5
    assert f"[6/{POINTS}]" in sweep.said


def test_a_point_that_kills_its_worker_fails_and_takes_no_other_along(cluster: Any, tmp_path: Path) -> None:
    words = ["trace.name=die,any", "workload.seed=range(3)", "execute.attempts=2"]
    sweep = sweep_of(tmp_path, f"execute.address={cluster.address}", *words)
    assert sweep.finish() == 1
    assert len(sweep.records()) == 3
    assert sweep.runs() == Counter(
        {f"{name} {seed}": 1 + (name == "die") for name in ("any", "die") for seed in range(3)}
    )
    assert "its worker was lost 2 times, the last time by WorkerCrashedError" in sweep.said


def test_a_failing_point_keeps_its_traceback(cluster: Any, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, f"execute.address={cluster.address}", "trace.name=fail,any", "workload.seed=1")
    assert sweep.finish() == 1
    (failure,) = (tmp_path / "results").rglob("failure.json")
    assert "raise RuntimeError" in failure.read_text()
    assert "RuntimeError: the point is broken" in sweep.said


def test_without_an_address_a_cluster_of_this_machine_does_it(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "workers=2")
    assert sweep.finish() == 0, sweep.said
    assert sweep.runs() == ONCE
    assert "Ray cluster at local: 2 cores" in sweep.said


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "execute.address=127.0.0.1:9")
    assert sweep.finish() == 2
    assert "cannot reach a Ray cluster at '127.0.0.1:9'" in sweep.said
    assert "Traceback" not in sweep.said
