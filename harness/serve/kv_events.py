"""KV cache events of the server, published as vLLM does: one ZeroMQ message for each step that changed the cache.

A message has the topic, its number (8 bytes, the largest first) and the batch in msgpack. Who missed messages asks the
replay address for all from a number on, and gets those that are still kept, then the end mark. The rules are those of
vLLM's `ZmqEventPublisher` (vllm/distributed/kv_events.py).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from engine.core.memory.paged import PagedManager
from harness.config.errors import UserError
from harness.console import install_hint
from harness.replay.memory import KvEvents
from traces.formats.kv_events import encode

KEPT = 10_000  # messages that can be asked for again
HIGH_WATER_MARK = 100_000  # messages that wait for a slow subscriber; further ones are dropped for it
END = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES = 8
_STOP = b""


class KvEventPublisher:
    """Publishes the changes of one prefix cache. `observe` is called in the engine's thread, after every step.

    An `endpoint` with `*` or `::`, of `ipc` or of `inproc`, is bound; any other is connected to. `subscribed` is set
    when the first subscriber has come.

    Raises:
        UserError: pyzmq is missing, or an address cannot be used.
    """

    def __init__(
        self,
        manager: PagedManager,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        kept: int = KEPT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._zmq = zmq = _zmq()
        self._recorder = KvEvents(manager)
        self._clock = clock
        self._topic = topic.encode()
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._published = 0
        self.subscribed = threading.Event()
        self._context = zmq.Context()
        self._inbox = self._socket(zmq.PULL)
        self._outbox = self._socket(zmq.PUSH)
        self._publisher = self._socket(zmq.XPUB)  # a PUB that sees who subscribes
        self._replay: Any = self._socket(zmq.ROUTER) if replay_endpoint is not None else None
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
        self._publisher.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._inbox.bind("inproc://batches")
        self._outbox.connect("inproc://batches")
        self._open("--kv-events", self._publisher, endpoint)
        if self._replay is not None:
            self._replay.setsockopt(zmq.SNDHWM, 2 * (kept + 1))
            self._open("--kv-events-replay", self._replay, str(replay_endpoint))
        self._thread = threading.Thread(target=self._run, name="pagetwin-kv-events", daemon=True)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        return socket

    def _open(self, flag: str, socket: Any, endpoint: str) -> None:
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(0)
            reason = f"{flag}: '{endpoint}' cannot be used: {error}; an address like tcp://*:5557 expected"
            raise UserError(reason) from error

    def start(self) -> None:
        """Start the thread that sends."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is left, and close the sockets. No step may be observed after it."""
        if self._thread.is_alive():
            self._outbox.send(_STOP)
            self._thread.join()
        self._context.destroy(0)

    def observe(self) -> None:
        """Publish what has changed since the last call."""
        batch = self._recorder.batch(self._clock())
        if batch is not None:
            self._outbox.send(encode(batch._replace(data_parallel_rank=0)))

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        zmq, poller = self._zmq, self._zmq.Poller()
        for socket in (self._inbox, self._publisher, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._publisher in ready:
                self._publisher.recv()
                self.subscribed.set()
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if self._inbox in ready:
                payload = self._inbox.recv()
                if payload == _STOP:
                    return
                self._publish(payload)

    def _publish(self, payload: bytes) -> None:
        number = self._published.to_bytes(_NUMBER_BYTES, "big")
        self._published += 1
        self._messages.append((number, payload))
        self._publisher.send_multipart((self._topic, number, payload))

    def _answer(self, frames: list[bytes]) -> None:
        """Send the kept messages from the number on that was asked for; what asks for none is ignored."""
        if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
            return
        client, _, first = frames
        for number, payload in self._messages:
            if number >= first:
                self._replay.send_multipart((client, b"", self._topic, number, payload))
        self._replay.send_multipart((client, b"", b"", END, b""))


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ImportError as error:
        reason = f"--kv-events: needs pyzmq, which is not installed: {install_hint('events')}"
        raise UserError(reason) from error
