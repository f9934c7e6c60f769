"""Several prompts of one HTTP request as one stream, and the end of all of them when the client goes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from engine.runtime.async_engine import AsyncEngine
from engine.runtime.engine import Prompt
from engine.runtime.params import SamplingParams
from engine.runtime.requests import RequestOutput
from harness.serve.answers import Envelope, usage_of
from harness.serve.failures import CLIENT_GONE, ServeError, body_of

Answer = TypeVar("Answer")
Numbered = tuple[int, RequestOutput]


async def merged(
    engine: AsyncEngine, name: str, prompts: Sequence[Prompt], params: SamplingParams, priority: int
) -> AsyncGenerator[Numbered, None]:
    """(number of the prompt, news) of all prompts, as they come. Closing it aborts what is under way."""
    news: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()

    async def follow(number: int, prompt: Prompt) -> None:
        stream = engine.generate(f"{name}-{number}", prompt, params, priority=priority)
        try:
            async for output in stream:
                news.put_nowait((number, output))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(follow(number, prompt)) for number, prompt in enumerate(prompts)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def events(
    stream: AsyncGenerator[Numbered, None],
    first: Numbered,
    envelope: Envelope,
    width: int,
    *,
    with_usage: bool,
) -> AsyncGenerator[str, None]:
    """Server-sent events; an error after the first one ends the stream with a body that names it."""
    ends: dict[int, RequestOutput] = {}
    opened: set[int] = set()

    def lines(number: int, output: RequestOutput) -> list[str]:
        bodies = []
        for one in output.outputs:
            index = number * width + one.index
            if envelope.chat and index not in opened:
                opened.add(index)
                bodies.append(envelope.body([envelope.opening(index)], None, chunk=True))
            bodies.append(envelope.body([envelope.choice(one, index, chunk=True)], None, chunk=True))
        if output.finished:
            ends[number] = output
        return [_event(body) for body in bodies]

    try:
        for line in lines(*first):
            yield line
        async for number, output in stream:
            for line in lines(number, output):
                yield line
        if with_usage:
            usage = usage_of(list(ends.values()), lambda output: output.metrics.output_tokens)
            yield _event(envelope.body([], usage, chunk=True))
    except Exception as error:
        yield _event(body_of(error)[1])
    finally:
        await stream.aclose()
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`, which is cancelled when the client closes the connection."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ServeError(CLIENT_GONE, "the client has gone", kind="client_closed_request")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
