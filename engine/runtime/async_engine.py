"""The engine for many clients at once: it runs in a thread of its own, and each request is an async stream.

`EngineThread` takes commands through one queue, between two steps, and hands on the outputs of a step as one
`Delivery`. `AsyncEngine` is the side of the clients. Both only exchange plain messages, so they may be in two
processes (`harness.serve.apart`). Texts are encoded on the clients' side and forms compiled on the engine's, in threads
of their own but for short texts, so that a long one stops nobody. Closing a stream early aborts its request.
"""

import asyncio
import os
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

from engine.core.options import SchedulerLimits
from engine.core.policies import Policies
from engine.runtime.engine import Engine, EngineCounters, PoolSize, PreparedPrompt, Prompt
from engine.runtime.errors import EngineDeadError
from engine.runtime.params import SamplingParams
from engine.runtime.requests import RequestOutput, bounded, encode_prompt, truncated
from engine.runtime.text import Tokenizer

Result = TypeVar("Result")
_THREADS = 4  # a tokenizer lets other threads run while it encodes
_SHORT = 512  # characters, less than handing them to a thread and back takes
_LONG = 16_384  # characters, some milliseconds
_Item = RequestOutput | Exception
Observer = Callable[[list[RequestOutput]], None]


class Add(NamedTuple):
    """Queue a request. `number` is that of its stream."""

    number: int
    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int
    cache_salt: str


class Abort(NamedTuple):
    """End the request of a stream."""

    number: int


class Reset(NamedTuple):
    """Empty the prefix cache."""


class Delivery(NamedTuple):
    """What happened since the last one: (number of a stream, its output or error); `ended` is the reason of the end."""

    items: list[tuple[int, _Item]]
    counters: EngineCounters
    ended: Exception | None = None


Command = Add | Abort | Reset | Callable[[], None] | None  # None: stop
Deliver = Callable[[Delivery], None]


class Link(Protocol):
    """The way from the clients to the engine's thread."""

    def start(self, deliver: Deliver) -> None:
        """Begin to take commands, and to hand on what comes of them."""

    def put(self, command: Command) -> None:
        """Send a command."""

    def stop(self) -> None:
        """End the engine's thread after the current step, and wait for its last delivery."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What clients need to know of an engine that runs elsewhere."""

    name: str
    tokenizer: Tokenizer | None
    limits: SchedulerLimits
    capacity: PoolSize
    prefix_caching: bool
    uses_priority: bool  # any policy differs from first come, first served; a user's own may use priorities

    @classmethod
    def of(cls, engine: Engine) -> "EngineFacts":
        """The facts of an engine."""
        found, plain = (vars(policies).values() for policies in (engine.scheduler.policies, Policies()))
        differs = any(type(one) is not type(other) for one, other in zip(found, plain, strict=True))
        size, caching = engine.capacity, engine.prefix_caching
        return cls(engine.loaded.name, engine.tokenizer, engine.limits, size, caching, differs)


class EngineThread:
    """Runs an engine in a thread. After `start`, no other thread may use the engine.

    `observe` is called in the thread after every step.
    """

    def __init__(self, engine: Engine, observe: Callable[[], None] = lambda: None) -> None:
        self._engine, self._observe = engine, observe
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._streams: dict[str, int] = {}  # numbers by request id
        self._forming: set[int] = set()  # streams whose form is being compiled
        self._forms = ThreadPoolExecutor(_THREADS, "pagetwin-forms")
        self.put = self._inbox.put

    def start(self, deliver: Deliver) -> None:
        """Start the thread."""
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="pagetwin-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step."""
        self.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended: Exception = EngineDeadError("it was stopped")
        try:
            while self._take_commands():
                outputs = self._engine.step()
                self._hand_on([(self._number_of(output), output) for output in outputs])
                self._observe()
        except Exception as error:
            ended = error
        self._forms.shutdown(wait=False, cancel_futures=True)
        self._hand_on([], ended)

    def _hand_on(self, items: list[tuple[int, _Item]], ended: Exception | None = None) -> None:
        """Deliver, with counters that later steps do not change: who takes them may be late."""
        counters = self._engine.counters
        self._deliver(Delivery(items, replace(counters, finished=counters.finished.copy()), ended))

    def _number_of(self, output: RequestOutput) -> int:
        """The stream of an output; -1: its client has gone."""
        take = self._streams.pop if output.finished else self._streams.get
        return take(output.request_id, -1)

    def _take_commands(self) -> bool:
        """Run all waiting commands. An idle engine waits for one. False: stop."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_unfinished_requests)
            except Empty:
                return True
            if command is None:
                return False
            self._obey(command)

    def _obey(self, command: Add | Abort | Reset | Callable[[], None]) -> None:
        match command:
            case Add(params=params) if params.structured_outputs is not None:
                self._forming.add(command.number)
                self._forms.submit(self._form, command)
            case Add():
                self._add(command, PreparedPrompt(list(command.prompt_ids), None, None))
            case Abort(number):
                self._forming.discard(number)
                found = [one for one, owner in self._streams.items() if owner == number]
                for request_id in found:
                    del self._streams[request_id]
                    self._engine.abort(request_id)
            case Reset():
                self._engine.reset_prefix_cache()
                self._observe()
            case _:
                command()

    def _form(self, command: Add) -> None:
        """Compile the form of a request, beside the thread."""
        try:
            ready: PreparedPrompt | Exception = self._engine.prepared(command.prompt_ids, command.params)
        except Exception as error:
            ready = error

        def add() -> None:
            if command.number in self._forming:  # else its client has gone
                self._forming.discard(command.number)
                self._add(command, ready)

        self.put(add)

    def _add(self, command: Add, ready: PreparedPrompt | Exception) -> None:
        number, request_id, _, params, priority, salt = command
        try:
            if isinstance(ready, Exception):
                raise ready
            self._engine.add_request(request_id, ready, params, priority=priority, cache_salt=salt)
        except Exception as error:
            self._hand_on([(number, error)])
        else:
            self._streams[request_id] = number


@dataclass(slots=True, eq=False)
class _Stream:
    """One client's stream: its prompt, its event loop, and the outputs that it has not read yet."""

    prompt: str | None
    prompt_ids: Sequence[int]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    items: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)


def _yield_to_others() -> None:
    """Let this thread run where no other wants to."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


class AsyncEngine:
    """Serves many asyncio clients.

        server = AsyncEngine(engine)
        server.start()
        async for output in server.generate("first", "The cat", SamplingParams()):
            print(output.outputs[0].text)
        server.stop()

    `engine` is an engine, which then belongs to a thread of this object, or the facts of one at the other end of
    `link`. If an error ends the thread, it is in `death`.
    """

    def __init__(self, engine: Engine | EngineFacts, link: Link | None = None) -> None:
        self.facts = EngineFacts.of(engine) if isinstance(engine, Engine) else engine
        self.counters = EngineCounters()
        self.death: Exception | None = None  # the error that ended the thread; None if `stop` ended it
        if link is None:
            assert isinstance(engine, Engine)
            link = EngineThread(engine)
        self._link = link
        self._numbers = count()
        self._streams: dict[int, _Stream] = {}
        self._open = False
        self._lock = threading.Lock()  # of `_open` and `_streams`
        self._aside = ThreadPoolExecutor(_THREADS, "pagetwin-words")  # encodes texts
        self._behind = ThreadPoolExecutor(1, "pagetwin-long-words", initializer=_yield_to_others)

    def start(self, observe: Observer = lambda outputs: None) -> None:
        """Start the thread. `observe` is called with the outputs of every step."""
        self._observe, self._open = observe, True
        self._link.start(self._receive)

    def stop(self) -> None:
        """End the thread after the current step. Streams that are still open raise EngineDeadError."""
        self._link.stop()
        for pool in (self._aside, self._behind):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and accepts requests."""
        return self._open

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
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        encode = partial(encode_prompt, prompt, self.facts.tokenizer)
        at_once = text is not None and len(text) <= _SHORT
        ids = encode() if at_once else await self.aside(encode, len(text or ""))
        ids = truncated(ids, params, self.facts.limits)
        params = bounded(params, ids, self.facts.limits)
        number, stream, finished = next(self._numbers), _Stream(text, ids), False
        with self._lock:
            self._check_open()
            self._streams[number] = stream
        self._link.put(Add(number, request_id, ids, params, priority, cache_salt))
        try:
            while not finished:
                item = await stream.items.get()
                finished = isinstance(item, Exception) or item.finished
                if isinstance(item, Exception):
                    raise item
                if item.error is not None:
                    raise item.error
                yield replace(item, prompt=text, prompt_token_ids=ids)
        finally:
            self._streams.pop(number, None)
            if not finished:
                self._link.put(Abort(number))

    async def aside(self, work: Callable[[], Result], characters: int) -> Result:
        """What `work` makes of a text, in a thread of its own. Long texts wait for each other.

        Raises EngineDeadError.
        """
        self._check_open()
        pool = self._behind if characters > _LONG else self._aside
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _check_open(self) -> None:
        if not self._open:
            why = self.death or "it was stopped, or never started"
            raise EngineDeadError(f"the engine does not run: {why}")

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`, between two steps."""
        self._link.put(Reset())

    def _receive(self, delivery: Delivery) -> None:
        """Hand the outputs of a step to their streams, those of an event loop in one call."""
        items, self.counters, ended = delivery
        self._observe([item for _, item in items if isinstance(item, RequestOutput)])
        if ended is not None:
            with self._lock:
                self._open = False
                self.death = None if isinstance(ended, EngineDeadError) else ended
                items = [
                    (number, EngineDeadError(f"the engine has ended: {ended}")) for number in [*self._streams]
                ]
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]] = defaultdict(list)
        for number, item in items:
            stream = self._streams.get(number)
            if stream is not None:  # else the client has gone
                by_loop[stream.loop].append((stream, item))
        for loop, found in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, found)


def _put_all(items: Sequence[tuple[_Stream, _Item]]) -> None:
    for stream, item in items:
        stream.items.put_nowait(item)
