"""The HTTP server in a process of its own, so that no body that it reads holds up a step of the engine.

The process is forked before a model is loaded: it shares the modules and no tensor. Where another thread lived at the
fork, whose locks it would keep for ever, it is a new interpreter instead. Both sides exchange the messages of
`engine.runtime.async_engine` through one pipe. Signals go to the server, which ends its streams and tells the engine.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import FrameType
from typing import Any

from engine.runtime.async_engine import AsyncEngine, Command, Deliver, Delivery, EngineFacts, EngineThread
from engine.runtime.engine import EngineCounters
from engine.runtime.errors import EngineDeadError
from engine.runtime.requests import RequestOutput
from harness.config.errors import UserError
from harness.serve.app import build_app
from harness.serve.limits import Listener

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Pipe:
    """The server's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def start(self, deliver: Deliver) -> None:
        """Begin to hand on what the engine delivers."""
        self._reader = threading.Thread(target=self._read, args=(deliver,), daemon=True)
        self._reader.start()

    def put(self, command: Command) -> None:
        """Send a command."""
        with self._sending, suppress(BrokenPipeError):  # the reader says that the engine has gone
            self._connection.send(command)

    def stop(self) -> None:
        """Stop the engine, and wait for its last delivery."""
        self.put(None)
        self._reader.join()

    def _read(self, deliver: Deliver) -> None:
        delivery = None
        while delivery is None or delivery.ended is None:
            try:
                delivery = self._connection.recv()
            except (EOFError, ConnectionResetError):
                delivery = Delivery([], EngineCounters(), EngineDeadError("its process has gone"))
                os.kill(os.getpid(), signal.SIGTERM)
            deliver(delivery)


class Apart:
    """The process of a server. Make it before the model is loaded, and within its block call `run`.

    `options` are those of `build_app`.
    """

    def __init__(self, listener: socket.socket, **options: Any) -> None:
        context: Any = multiprocessing.get_context("fork" if _alone() else "spawn")
        self._connection, theirs = context.Pipe()
        given = (listener, options, theirs, self._connection)
        self._process: BaseProcess = context.Process(target=_begin, args=given)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def run(self, facts: EngineFacts, thread: EngineThread) -> None:
        """Serve an engine until a signal comes, which is then raised here. Raises UserError if the server fails."""
        with self._signals() as came:
            self._connection.send(facts)
            outbox: SimpleQueue[Delivery] = SimpleQueue()
            threading.Thread(target=self._send, args=(outbox,), daemon=True).start()
            thread.start(outbox.put)
            with suppress(EOFError, ConnectionResetError):
                while True:
                    thread.put(self._connection.recv())
            thread.stop()
            self._process.join()
        if came:
            signal.raise_signal(came[0])
        elif self._process.exitcode:
            raise UserError(f"the process of the HTTP server ended with exit code {self._process.exitcode}")

    def _send(self, outbox: "SimpleQueue[Delivery]") -> None:
        with suppress(BrokenPipeError):  # the server has gone
            while True:
                items, _, ended = delivery = outbox.get()
                ended = None if ended is None else _portable(ended)
                self._connection.send(delivery._replace(items=[*map(_light, items)], ended=ended))

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """Pass signals to the server; gives those that came."""
        came: list[int] = []

        def passed(number: int, frame: FrameType | None) -> None:
            came.append(number)
            self._process.terminate()

        before = {number: signal.signal(number, passed) for number in _SIGNALS}
        try:
            yield came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _light(item: tuple[int, RequestOutput | Exception]) -> tuple[int, RequestOutput | Exception]:
    """An item without the prompt, which the client's side has."""
    number, output = item
    if isinstance(output, RequestOutput):
        return number, replace(output, prompt=None, prompt_token_ids=())
    return number, _portable(output)


def _portable(error: Exception) -> Exception:
    """An error as another process can make it: one of a policy, a tokenizer or a library may need more than its text.

    Sending it would end the thread that sends, or the one that reads, and every client would wait for ever.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _alone() -> bool:
    """Whether no other thread lives at a fork. Libraries of linear algebra end theirs before one, so one is made."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _begin(
    listener: socket.socket, options: Mapping[str, Any], connection: Connection, other: Connection
) -> None:
    """The process of the server: a terminal's signals come by way of the engine's process."""
    os.setsid()
    other.close()
    sys.setswitchinterval(0.0005)  # s: each output passes from the thread that reads it to the event loop
    with suppress(EOFError):  # the engine could not be made
        engine = AsyncEngine(connection.recv(), _Pipe(connection))
        Listener(build_app(engine, **options)).run(sockets=[listener])
