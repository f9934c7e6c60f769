"""Simulation-only points in worker processes, which die with their parent and never hold up an interrupted sweep."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from harness.execute.point import Failed, run_and_commit, store_failure
from harness.plan.planning import PlannedPoint

Done = tuple[PlannedPoint, Failed | None]


def run_in_workers(points: Sequence[PlannedPoint], out: Path, runner: str, workers: int) -> Iterator[Done]:
    """Run points in `workers` processes and yield each as it is committed or has failed.

    When a worker dies (killed for memory, say), nobody can tell which of the running points did it: those that were
    left are run again one at a time, and the one that kills its worker a second time has failed.
    """
    left = {point.fingerprint: point for point in points}
    for point, failed in _run_together(points, out, runner, workers):
        del left[point.fingerprint]
        yield point, failed
    while left:
        for point, failed in _run_singly(list(left.values()), out, runner):
            del left[point.fingerprint]
            yield point, failed


def _run_together(points: Sequence[PlannedPoint], out: Path, runner: str, workers: int) -> Iterator[Done]:
    """Yields what was finished before a worker died, if one did."""
    with _pool(workers) as pool:
        futures = {pool.submit(run_and_commit, point, out, runner): point for point in points}
        for future in as_completed(futures):
            if not isinstance(future.exception(), BrokenProcessPool):
                yield futures[future], future.result()


def _run_singly(points: Sequence[PlannedPoint], out: Path, runner: str) -> Iterator[Done]:
    """One worker, one point at a time, up to the point that kills the worker."""
    with _pool(1) as pool:
        for point in points:
            future: Future[Failed | None] = pool.submit(run_and_commit, point, out, runner)
            if isinstance(future.exception(), BrokenProcessPool):
                message = "its process died; most likely it was killed for using too much memory"
                yield point, store_failure(point, out, message, [message])
                return
            yield point, future.result()


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes exit at once when the block is left early or when this process is killed.

    Each worker waits on one end of a pipe. Only this process holds the other end, so the pipe closes when the block
    ends and also when the process is gone, whatever killed it.
    """
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_live_with, initargs=(theirs,))
    try:
        yield pool
        pool.shutdown()
    finally:
        ours.close()
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _live_with(lifeline: Connection) -> None:
    """Start of a worker: Ctrl-C is for the parent to handle, and no parent means no reason to go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()


def _wait_for_end(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except EOFError:
        os._exit(1)
