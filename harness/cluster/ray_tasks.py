"""The driver of `execute=ray`: points run as tasks of a Ray cluster, and their results come back to be committed here.

So only the driver's machine needs the store; the nodes need PageTwin in the same version, and the files that the points
read at the same paths. A task of a dead driver ends with it, and its point runs again by the same command. Results are
unpickled by Ray: whoever can reach the cluster can run code on it and here, which is so for every use of Ray.
"""

import os
import shutil
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from harness.cluster.job import CheckedRunner, Identity
from harness.config.errors import ConfigError
from harness.config.schema import ExecuteConfig, RunConfig
from harness.console import install_hint, numbered
from harness.sweep.execute import Done, PointRunner, commit_result, described, store_failure
from harness.sweep.plan import PlannedPoint, SweepPlan
from harness.sweep.progress import Reporter

if TYPE_CHECKING:
    from harness.point import PointResult, PointSession

_LOOK_S = 5.0  # between two looks at the cluster while nothing ends
_KNOCK_S = 20.0  # to wait for the head node's answer
_AHEAD = 2  # tasks handed in for each that can run: the next one is there when one ends
_PATIENCE = 10  # times execute.attempts: nodes that may be lost with a point before it has failed


def check_ray(sweep: SweepPlan) -> None:
    """Raise ConfigError where Ray is missing."""
    if find_spec("ray") is None:
        raise ConfigError("execute", f"ray needs Ray: {install_hint('ray')}")


@dataclass(frozen=True)
class _Result:
    """A point that has run, as it travels from its node to the driver, and for how long it ran."""

    result: "PointResult"
    took_s: float


@dataclass(frozen=True)
class _Failure:
    """A point that raised an exception. It travels as text, because an exception may not be picklable."""

    error: str
    traceback: list[str]


def run_remotely(config: RunConfig, name: str, runner: PointRunner, identity: Identity) -> _Result | _Failure:
    """The task: check that this node sees the planned point, and run it."""
    started = time.perf_counter()
    try:
        result = CheckedRunner(runner, identity, frozenset([name]))(config)
    except Exception as error:  # a failing point must not stop the others
        return _Failure(*described(error))
    return _Result(result, time.perf_counter() - started)


def run_on_ray(
    sweep: SweepPlan, todo: Sequence[PlannedPoint], runner: PointRunner, reporter: Reporter, *, session: "PointSession",
) -> Iterator[Done]:  # fmt: skip
    """Run points as tasks; yields each when it is committed or has failed. A backend of `harness.sweep.execute`.

    Raises:
        ConfigError: the cluster cannot be reached.
        StoreError: the store cannot be written any more.
    """
    execute = sweep.points[0].config.execute
    with _connected(execute, sweep.workers, reporter):
        yield from _RayDriver(sweep, deque(todo), runner, session.point_identity, reporter).run()


@contextmanager
def _connected(execute: ExecuteConfig, workers: int, reporter: Reporter) -> Iterator[None]:
    """Connect to the cluster, or start one of this machine, whose files lie in a private folder until it ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here reports to nobody
    import ray

    address = execute.address or os.environ.get("RAY_ADDRESS") or "local"
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    own = tempfile.mkdtemp(prefix="pt-ray-") if address == "local" else None
    try:
        _knock(address)
        if own is not None:
            cores = max(workers or os.cpu_count() or 1, execute.cpus)
            ray.init("local", num_cpus=cores, include_dashboard=False, _temp_dir=own, **quiet)
        else:
            ray.init(address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError("execute.address", f"cannot reach a Ray cluster at '{address}': {said}") from None
    try:
        reporter.says(f"Ray cluster at {address}: {_cores():,.0f} cores")
        yield
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT or ray://HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def _cores() -> float:
    import ray

    return float(ray.cluster_resources().get("CPU", 0.0))


@dataclass
class _RayDriver:
    sweep: SweepPlan
    queue: deque[PlannedPoint]
    runner: PointRunner
    identity: Identity
    reporter: Reporter
    running: dict[Any, PlannedPoint] = field(default_factory=dict)  # by the reference of the task's result
    deaths: Counter[str] = field(default_factory=Counter)  # by fingerprint: workers that died with the point
    losses: Counter[str] = field(default_factory=Counter)  # by fingerprint: tasks that were lost, however
    said: str = ""

    def run(self) -> Iterator[Done]:
        import ray

        task = self._task()
        while self.queue or self.running:
            self._hand_in(task)
            ready, _ = ray.wait(list(self.running), num_returns=1, timeout=_LOOK_S)
            if not ready:
                self._say_why()
            for reference in ready:
                ended = self._take(reference)
                if ended is not None:
                    yield ended

    def _task(self) -> Any:
        import ray

        execute = self.sweep.points[0].config.execute
        needs: dict[str, Any] = {"num_cpus": execute.cpus, "num_gpus": execute.gpus}
        if execute.memory_gb:
            needs["memory"] = int(execute.memory_gb * 1e9)
        return ray.remote(max_retries=0, **needs)(run_remotely)  # lost tasks are counted and run again here

    def _hand_in(self, task: Any) -> None:
        """Hand in as many points as can run soon, and not all: each holds its configuration in the cluster."""
        room = max(1, int(_AHEAD * _cores() / self.sweep.points[0].config.execute.cpus))
        while self.queue and len(self.running) < room:
            point = self.queue.popleft()
            self.running[task.remote(point.config, point.fingerprint, self.runner, self.identity)] = point

    def _take(self, reference: Any) -> Done | None:
        """Commit a result, or store a failure; None for a point that was lost and runs again."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

        point = self.running.pop(reference)
        try:
            ended = ray.get(reference)
        except RayTaskError as error:  # the node cannot run the task at all, or its result cannot travel
            return point, store_failure(point, self.sweep.out, *described(error))
        except RayError as error:
            blamed = isinstance(error, WorkerCrashedError | OutOfMemoryError)
            return self._lost(point, type(error).__name__, blamed)
        if isinstance(ended, _Failure):
            return point, store_failure(point, self.sweep.out, ended.error, ended.traceback)
        commit_result(point, self.sweep.out, ended.result, ended.took_s)
        return point, None

    def _lost(self, point: PlannedPoint, why: str, blamed: bool) -> Done | None:
        name, attempts = point.fingerprint, point.config.execute.attempts
        self.losses[name] += 1
        self.deaths[name] += blamed
        if self.deaths[name] >= attempts or self.losses[name] >= _PATIENCE * attempts:
            error = f"its worker was lost {numbered(self.losses[name], 'time')}, the last time by {why}"
            return point, store_failure(point, self.sweep.out, error, [error])
        self.reporter.says(f"a worker was lost ({why}) with {point.label}; running it again")
        self.queue.append(point)
        return None

    def _say_why(self) -> None:
        """Say that nothing can run where the cluster has too little room, when that begins."""
        needed = self.sweep.points[0].config.execute.cpus
        cores = _cores()
        text = f"points wait: a task needs {needed} cores, the cluster has {cores:,.0f} at present"
        if cores < needed and text != self.said:
            self.reporter.says(text)
            self.said = text
