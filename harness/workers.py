"""Worker processes that end with the process that started them, whatever ends it."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

_AHEAD = 2  # items handed in for each worker

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_workers(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`function` of each item, in the order of the items, in `workers` processes; 1 stays in this process.

    Only a few results wait to be taken, so that many large ones need little memory. A function at the top level of a
    module, and items and results that can be pickled.
    """
    waiting = iter(items)
    if workers <= 1:
        yield from map(function, waiting)
        return
    with worker_pool(workers) as pool:
        running: deque[Future[Result]] = deque(
            pool.submit(function, item) for item in islice(waiting, _AHEAD * workers)
        )
        while running:
            result = running.popleft().result()
            running.extend(pool.submit(function, item) for item in islice(waiting, 1))
            yield result


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A process pool whose workers exit at once when the block is left early or when this process is killed.

    Each worker waits on one end of a pipe. Only this process holds the other end. The pipe closes when the block ends,
    and also when this process ends for any reason.
    """
    context = multiprocessing.get_context("spawn")
    _start_tracker()
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(theirs,))
    try:
        yield pool
        pool.shutdown()
    finally:
        ours.close()
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _start_tracker() -> None:
    """Start multiprocessing's helper process deaf to SIGHUP, which a closed terminal sends to the whole group.

    Without it every worker prints a traceback when it ends. A signal that comes meanwhile is delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(pipe: Connection) -> None:
    """Prepare a worker: it ignores the signals that the parent handles, and exits when the parent's pipe closes.

    SIGUSR2 goes to every process of a job of Slurm, shortly before the job has to end.
    """
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()


def _exit_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        os._exit(1)
