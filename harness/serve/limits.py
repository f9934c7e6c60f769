"""What one client may take: bytes of a body, and seconds to send a request. And how a server ends its streams."""

import asyncio
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY_BYTES = 16 << 20  # JSON takes up to 18 times as much memory once it is parsed
HEAD_S = 20.0  # for the line and the headers of a request
BODY_S = 30.0  # between two parts of a body
# a body is large from here on: its parts are taken with pauses, for which others need not wait
LARGE_BYTES = 1 << 20
PAUSE_S = 0.01
# between the ends of two large bodies: each takes some 10 ms to be parsed, for which all others wait
GAP_S = 0.1


class BodyLimit:
    """Answers 413 to a body of more than `MAX_BODY_BYTES`, which is read to its end and not kept, and 408 to one whose
    next part does not come within `BODY_S` seconds. Reads large bodies with pauses, and gives them one by one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._free_s = app, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count the bytes of its body."""
        read, more = 0, True

        async def part() -> Message:
            if read > LARGE_BYTES:
                await asyncio.sleep(PAUSE_S)
            try:
                return await asyncio.wait_for(receive(), BODY_S)
            except TimeoutError as error:
                raise HTTPException(408, f"the body did not go on for {BODY_S:.0f} s") from error

        async def counted() -> Message:
            nonlocal read, more
            message = await (part() if more else receive())  # behind the body it waits for the client to go
            more = more and message.get("more_body", False)
            read += len(message.get("body", b""))
            if read <= MAX_BODY_BYTES:
                if read > LARGE_BYTES and not more:
                    self._free_s = max(time.monotonic(), self._free_s) + GAP_S
                    await asyncio.sleep(self._free_s - GAP_S - time.monotonic())
                return message
            while message.get("more_body"):
                message = await part()
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")

        await self._app(scope, counted, send)


class Connection(H11Protocol):
    """A connection that is closed where the head of its next request is not whole after `HEAD_S` seconds.

    What it writes is sent at once. asyncio sees to that only for listeners that name TCP, which ours do not: the body
    of an answer, and each token of a stream, then wait up to 40 ms until the client has acknowledged what came before.
    """

    _since: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if self._is_waiting and self._since is None:
            self._wait()
        elif not self._is_waiting and self._since is not None:
            self._since.cancel()
            self._since = None

    def _wait(self) -> None:
        self._since = self.loop.call_later(HEAD_S, self._close)

    def _close(self) -> None:
        self._since = None
        if self._is_waiting and not self.transport.is_closing():
            self.transport.close()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete


class Listener(uvicorn.Server):
    """The HTTP server. A signal to stop ends the engine at once, and open streams with an event that says so."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        given = {"log_level": "warning", "timeout_graceful_shutdown": 2, **options}
        super().__init__(uvicorn.Config(app, http=Connection, **given))
        self._engine = app.state.server.engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the engine beside the event loop, which tells the streams."""
        threading.Thread(target=self._engine.stop, name=f"stop-{signal.Signals(sig).name}").start()
        super().handle_exit(sig, frame)
