"""The engine for many clients at once: it runs in a thread of its own, and each request is an async stream.

Texts are encoded and forms compiled beside it, in threads of their own, so that a long one stops nobody.
Commands go to the thread through one queue, and the thread runs them between two steps. All outputs of a step go to an
event loop in one call. Closing a stream early aborts its request.
"""

import asyncio
import os
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from engine.runtime.engine import Engine, Prompt
from engine.runtime.errors import EngineDeadError
from engine.runtime.params import SamplingParams
from engine.runtime.requests import RequestOutput

Result = TypeVar("Result")
_THREADS = 4  # a tokenizer lets other threads run while it encodes
_LONG = 16_384  # characters, some milliseconds
_Item = RequestOutput | Exception
Observer = Callable[[list[RequestOutput]], None]
_Inbox = SimpleQueue[Callable[[], None] | None]


@dataclass(slots=True, eq=False)
class _Stream:
    """One client's stream: its event loop, and the outputs that it has not read yet."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    items: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)


def _yield_to_others() -> None:
    """Let this thread run where no other wants to."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


class AsyncEngine:
    """Runs an engine in a thread and serves many asyncio clients.

        server = AsyncEngine(engine)
        server.start()
        async for output in server.generate("first", "The cat", SamplingParams()):
            print(output.outputs[0].text)
        server.stop()

    After `start`, no other thread may use the engine. `observe` is called in the engine's thread after every step, with
    the outputs of the step. If an error ends the thread, it is in `death`.
    """

    def __init__(self, engine: Engine, *, observe: Observer | None = None) -> None:
        self.engine = engine
        self.death: Exception | None = None  # the error that ended the thread; None if `stop` ended it
        self._observe = observe or (lambda outputs: None)
        self._inbox: _Inbox = SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._stopping = False
        self._aside = ThreadPoolExecutor(_THREADS, "pagetwin-words")  # encodes texts and compiles forms
        self._behind = ThreadPoolExecutor(1, "pagetwin-long-words", initializer=_yield_to_others)
        self._thread = threading.Thread(target=self._run, name="pagetwin-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step. Streams that are still open raise EngineDeadError."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        for pool in (self._aside, self._behind):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and accepts requests."""
        return self._thread.is_alive() and not self._stopping

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue one request and yield its outputs until it has finished.

        Raises what `Engine.add_request` raises, the error of a request that failed, and EngineDeadError.
        """
        if not self.alive:
            why = self.death or "it was stopped, or never started"
            raise EngineDeadError(f"the engine does not run: {why}")
        stream = _Stream()
        prepare = partial(self.engine.prepared, prompt, params)
        ready = await self.aside(prepare, len(prompt) if isinstance(prompt, str) else 0)

        def add() -> None:
            try:
                self.engine.add_request(request_id, ready, params, priority=priority, cache_salt=cache_salt)
            except Exception as error:
                self._send({stream.loop: [(stream, error)]})
            else:
                self._streams[request_id] = stream

        def abort() -> None:
            if self._streams.get(request_id) is stream:  # else another client uses its id now
                del self._streams[request_id]
                self.engine.abort(request_id)

        self._inbox.put(add)
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                finished = isinstance(item, Exception) or item.finished
                if isinstance(item, Exception):
                    raise item
                if item.error is not None:
                    raise item.error
                yield item
        finally:
            if not finished:
                self._inbox.put(abort)

    async def aside(self, work: Callable[[], Result], characters: int) -> Result:
        """What `work` makes of a text, in a thread of its own. Long texts wait for each other."""
        pool = self._behind if characters > _LONG else self._aside
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`, between two steps; the observer is called, as after a step."""

        def reset() -> None:
            self.engine.reset_prefix_cache()
            self._observe([])

        self._inbox.put(reset)

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                outputs = self.engine.step()
                self._deliver(outputs)
                self._observe(outputs)
        except Exception as error:
            self.death = error
        self._close_streams()

    def _take_commands(self) -> None:
        """Run all waiting commands. An idle engine waits for one."""
        while not self._stopping:
            try:
                command = self._inbox.get(block=not self.engine.has_unfinished_requests)
            except Empty:
                return
            if command is not None:
                command()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else the client has gone
                by_loop[stream.loop].append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]
        self._send(by_loop)

    @staticmethod
    def _send(by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]]) -> None:
        def put_all(items: list[tuple[_Stream, _Item]]) -> None:
            for stream, item in items:
                stream.items.put_nowait(item)

        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(put_all, items)

    def _close_streams(self) -> None:
        """End all streams, also those of commands that came too late, so that no client waits for ever."""
        self._stopping = True
        reason = EngineDeadError(f"the engine has ended: {self.death or 'it was stopped'}")
        while True:
            try:
                command = self._inbox.get(block=False)
            except Empty:
                break
            if command is not None:
                command()
        for stream in self._streams.values():
            self._send({stream.loop: [(stream, reason)]})
        self._streams.clear()
