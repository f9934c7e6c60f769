"""The engine for many clients at once: it runs in a thread of its own, and each request is an async stream.

Commands reach the thread through one queue, and it takes them between steps. All outputs of a step reach a client's
event loop in one call. Closing a stream early aborts its request.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from queue import Empty, SimpleQueue

from engine.runtime.engine import Engine, Prompt
from engine.runtime.errors import EngineDeadError
from engine.runtime.params import SamplingParams
from engine.runtime.requests import RequestOutput

News = RequestOutput | Exception
Observer = Callable[[list[RequestOutput]], None]
_Inbox = SimpleQueue[Callable[[], None] | None]


class _Stream:
    """One asker: its event loop and what it has not read yet."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[News] = asyncio.Queue()


class AsyncEngine:
    """Owns an engine and its thread. `observe` is called there after every step with the step's news."""

    def __init__(self, engine: Engine, *, observe: Observer | None = None) -> None:
        self.engine = engine
        self.death: Exception | None = None  # why the thread ended, if it was not asked to
        self._observe = observe
        self._inbox: _Inbox = SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pagetwin-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way; streams that are still open get EngineDeadError."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._stopping

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """News of one request until it is over.

        Raises what `Engine.add_request` raises, the error of a request that failed, and EngineDeadError.
        """
        if not self.alive:
            raise EngineDeadError(
                f"the engine does not run: {self.death or 'it was stopped, or never started'}"
            )
        stream = _Stream()
        self._inbox.put(lambda: self._add(stream, request_id, prompt, params, priority))
        over = False
        try:
            while not over:
                news = await stream.news.get()
                over = isinstance(news, Exception) or news.finished
                if isinstance(news, Exception):
                    raise news
                if news.error is not None:
                    raise news.error
                yield news
        finally:
            if not over:
                self._inbox.put(lambda: self._abandon(stream, request_id))

    # -- in the thread -------------------------------------------------------------------------------------

    def _add(
        self, stream: _Stream, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> None:
        try:
            self.engine.add_request(request_id, prompt, params, priority=priority)
        except Exception as error:
            self._tell({stream.loop: [(stream, error)]})
        else:
            self._streams[request_id] = stream

    def _abandon(self, stream: _Stream, request_id: str) -> None:
        """Drop a request whose asker has gone, unless the name belongs to somebody else by now."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self.engine.abort(request_id)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                outputs = self.engine.step()
                self._deliver(outputs)
                if self._observe is not None:
                    self._observe(outputs)
        except Exception as error:
            self.death = error
        self._close_streams()

    def _take_commands(self) -> None:
        """All that wait; an idle engine waits for one."""
        while not self._stopping:
            try:
                command = self._inbox.get(block=not self.engine.has_unfinished_requests)
            except Empty:
                return
            if command is not None:
                command()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, News]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # abandoned
                continue
            by_loop[stream.loop].append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        self._tell(by_loop)

    @staticmethod
    def _tell(by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, News]]]) -> None:
        for loop, news in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, news)

    def _close_streams(self) -> None:
        """Nobody may wait for ever: commands that came too late are run down with the rest."""
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
            self._tell({stream.loop: [(stream, reason)]})
        self._streams.clear()


def _put_all(news: list[tuple[_Stream, News]]) -> None:
    for stream, item in news:
        stream.news.put_nowait(item)
