"""KV cache events of the server, published as vLLM does: one ZeroMQ message for each step that changed the cache.

A message has the topic, its number (8 bytes, the largest first) and the batch in msgpack. The rules are those of vLLM's
`ZmqEventPublisher` (vllm/distributed/kv_events.py), but for its replay address: who misses messages sees it by their
numbers. vLLM 0.33 also says the kind of the group's layers and their window, which a subscriber may miss.
"""

import time
from importlib import import_module
from typing import Any, Self

from engine.core.memory.paged import PagedManager
from harness.config.errors import UserError
from harness.console import install_hint
from harness.replay.memory import KvEvents
from traces.formats.kv_events import encode

HIGH_WATER_MARK = 100_000  # messages that wait for a slow subscriber; further ones are dropped for it
_LINGER_MS = 1000  # for what is on its way when the server stops


class KvEventPublisher:
    """Publishes the changes of one prefix cache. `observe` is called in the engine's thread, after every step.

    An `endpoint` with `*` or `::`, of `ipc` or of `inproc`, is bound; any other is connected to.

    Raises:
        UserError: pyzmq is missing, or the address cannot be used.
    """

    def __init__(self, manager: PagedManager, endpoint: str, *, topic: str = "") -> None:
        zmq = _zmq()
        self._recorder, self._topic, self._published = KvEvents(manager), topic.encode(), 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # a PUB that sees who subscribes
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (self._socket.bind if binds else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            reason = f"'{endpoint}' cannot be used: {error}; an address like tcp://*:5557 expected"
            raise UserError(f"--kv-events: {reason}") from error

    def observe(self) -> None:
        """Publish what has changed since the last call. It never waits."""
        batch = self._recorder.batch(time.time())
        if batch is not None:
            number = self._published.to_bytes(8, "big")
            self._published += 1
            self._socket.send_multipart((self._topic, number, encode(batch._replace(data_parallel_rank=0))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the socket. No step may be observed after it."""
        self._context.destroy(_LINGER_MS)


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ImportError as error:
        reason = f"--kv-events: needs pyzmq, which is not installed: {install_hint('events')}"
        raise UserError(reason) from error
