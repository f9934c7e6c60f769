"""Bodies of responses in OpenAI's format: whole answers, streams of chunks, and errors.

An error of the client has a 4xx status, an error of the server a 5xx status. If the client disconnects, all prompts of
its request are aborted.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request

from engine.core.errors import NeverFitsError
from engine.runtime.async_engine import AsyncEngine
from engine.runtime.decoding.generation import TokenLogprobs
from engine.runtime.engine import Prompt
from engine.runtime.errors import EngineDeadError, PromptError, RequestError
from engine.runtime.params import SamplingParams
from engine.runtime.requests import CompletionOutput, RequestOutput
from engine.runtime.text import Tokenizer
from harness.serve.protocol import AnswerOptions, StreamOptions

CLIENT_GONE = 499  # nginx's status for a client that closed the connection
Choice = dict[str, Any]
Answer = TypeVar("Answer")
NumberedOutput = tuple[int, RequestOutput]


class ServeError(Exception):
    """An error with its HTTP status."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


def error_body(message: str, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


_API_NAMES = {"beam_width": "n"}


def status_of(error: Exception) -> tuple[int, str, str | None]:
    """HTTP status, kind, and the wrong parameter, if any."""
    if isinstance(error, ServeError):
        return error.status, error.kind, error.param
    if isinstance(error, RequestError | NeverFitsError):
        wrong: Any = getattr(error, "field", "prompt" if isinstance(error, PromptError) else None)
        return 400, "invalid_request_error", _API_NAMES.get(wrong, wrong)
    if isinstance(error, EngineDeadError):
        return 503, "service_unavailable", None
    return 500, "server_error", None


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of any error."""
    status, kind, param = status_of(error)
    return status, error_body(str(error), status, kind, param)


@dataclass(frozen=True)
class Envelope:
    """The fields that all bodies of one answer have in common."""

    model: str
    chat: bool
    tokenizer: Tokenizer | None
    options: AnswerOptions = field(default_factory=AnswerOptions)
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Choice], usage: dict[str, Any] | None, *, chunk: bool) -> dict[str, Any]:
        """One body: a whole answer or a chunk."""
        kind = "text_completion" if not self.chat else "chat.completion" + (".chunk" if chunk else "")
        body: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.answer_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }
        if usage is not None or not chunk:
            body["usage"] = usage
        return body

    def choice(
        self, request: RequestOutput, output: CompletionOutput, index: int, *, chunk: bool, opens: bool = True
    ) -> Choice:
        """The choice of one sequence of a request. With `opens` it is whole, or the first chunk of its sequence."""
        if self.options.hides_output:
            output = replace(
                output,
                text="",
                token_ids=[],
                logprobs=None if output.logprobs is None else [],
                finish_reason="length" if output.finish_reason else None,
                stop_reason=None,
            )
        choice: Choice = {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.options.token_ids:
            choice["token_ids"] = output.token_ids
        if not self.chat:
            echoes = opens and self.options.echo
            # with token ids the prompt is in `prompt_token_ids` alone, as in vLLM
            text = (self._prompt_text(request) if echoes and not self.options.token_ids else "") + output.text
            choice |= self.prompt_fields(request) if opens else {}
            return choice | {
                "text": text,
                "logprobs": self._completion_logprobs(request if echoes else None, output),
            }
        said = {"role": "assistant", "content": output.text} if not chunk else {"content": output.text}
        return choice | {"delta" if chunk else "message": said, "logprobs": self._chat_logprobs(output)}

    def prompt_fields(self, request: RequestOutput) -> dict[str, Any]:
        """Token ids and log-probabilities of the prompt, where they were asked for."""
        fields: dict[str, Any] = {}
        if self.options.token_ids:
            fields["prompt_token_ids"] = list(request.prompt_token_ids)
        if self.options.prompt_logprobs:
            fields["prompt_logprobs"] = [
                None if entry is None else self._ranked(entry) for entry in request.prompt_logprobs or ()
            ]
        return fields

    def _ranked(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The log-probabilities at one position of the prompt, by token id, in vLLM's form."""
        found = [(token, value, rank) for rank, (token, value) in enumerate(entry.best, start=1)]
        if entry.token not in dict(entry.best):
            found.append((entry.token, entry.logprob, entry.rank))
        return {
            str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": self._text([token])}
            for token, value, rank in found
        }

    def _prompt_text(self, request: RequestOutput) -> str:
        return request.prompt if request.prompt is not None else self._text(list(request.prompt_token_ids))

    def shown_tokens(self, request: RequestOutput) -> int:
        """Tokens of all sequences of a request that the answer shows."""
        return 0 if self.options.hides_output else request.metrics.output_tokens

    def opening(self, index: int) -> Choice:
        """The first chunk of a chat answer, which names the role."""
        said = {"role": "assistant", "content": ""}
        return {"index": index, "delta": said, "finish_reason": None, "logprobs": None}

    # -- log-probabilities ---------------------------------------------------------------------------------

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens) if self.tokenizer is not None else ""

    def _token(self, token: int) -> str:
        if self.tokenizer is None or self.options.tokens_as_ids:
            return f"token_id:{token}"
        return self._text([token])

    def _completion_logprobs(
        self, echoed: RequestOutput | None, output: CompletionOutput
    ) -> dict[str, Any] | None:
        """Log-probabilities of the output, and in front of them those of an echoed prompt."""
        if output.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = list(output.logprobs)
        tokens = [entry.token for entry in output.logprobs]
        if echoed is not None:
            entries = [*(echoed.prompt_logprobs or ()), *entries]
            tokens = [*echoed.prompt_token_ids, *tokens]
        names = [self._token(token) for token in tokens]
        ends = [0]
        for name in names:
            ends.append(ends[-1] + len(name))
        return {
            "tokens": names,
            "token_logprobs": [entry and _finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._best(entry) for entry in entries],
            "text_offset": ends[:-1],
        }

    def _best(self, entry: TokenLogprobs) -> dict[str, float]:
        found = (*entry.best, (entry.token, entry.logprob))
        return {self._token(token): _finite(value) for token, value in found}

    def _chat_logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None

        def named(token: int, value: float) -> dict[str, Any]:
            name = self._token(token)
            return {"token": name, "logprob": _finite(value), "bytes": list(name.encode())}

        return {
            "content": [
                named(entry.token, entry.logprob) | {"top_logprobs": [named(*pair) for pair in entry.best]}
                for entry in output.logprobs
            ]
        }


def _finite(logprob: float) -> float:
    """A log-probability as a number of JSON, which knows no infinity: the one that OpenAI and vLLM give for it."""
    return max(logprob, -9999.0)


def usage_of(outputs: Sequence[RequestOutput], completion: int) -> dict[str, Any]:
    """The section `usage`: tokens of prompts and of answers, and prompt tokens found in the prefix cache."""
    prompt = sum(output.metrics.prompt_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.cached_tokens for output in outputs)},
    }


async def merged(
    engine: AsyncEngine,
    name: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    priority: int,
    cache_salt: str,
) -> AsyncGenerator[NumberedOutput, None]:
    """(number of the prompt, output) of all prompts, as outputs arrive. Closing it aborts unfinished requests."""
    news: asyncio.Queue[NumberedOutput | Exception | None] = asyncio.Queue()

    async def follow(number: int, prompt: Prompt) -> None:
        stream = engine.generate(f"{name}-{number}", prompt, params, priority=priority, cache_salt=cache_salt)
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
    stream: AsyncGenerator[NumberedOutput, None],
    first: NumberedOutput,
    envelope: Envelope,
    width: int,
    asked: StreamOptions,
) -> AsyncGenerator[str, None]:
    """Server-sent events of a stream. After the first event, an error ends the stream with a body that names it."""
    ends: dict[int, RequestOutput] = {}
    # by opened sequence: the characters of the tokens whose log-probabilities it has shown
    shown: dict[int, int] = {}
    generated: dict[int, int] = {}  # by sequence: its tokens so far
    always = asked.include_usage and asked.continuous_usage_stats

    def lines(number: int, output: RequestOutput) -> list[str]:
        bodies = []
        for one in output.outputs:
            index = number * width + one.index
            opens, new = index not in shown, 0 if envelope.options.hides_output else len(one.token_ids)
            if envelope.chat and opens:
                usage = usage_of([output], 0) if always else None
                first_body = envelope.body([envelope.opening(index)], usage, chunk=True)
                bodies.append(first_body | envelope.prompt_fields(output))
            generated[index] = generated.get(index, 0) + new
            usage = usage_of([output], generated[index]) if always else None
            choice = envelope.choice(output, one, index, chunk=True, opens=opens)
            before, scores = shown.setdefault(index, 0), choice["logprobs"] or {}
            if "text_offset" in scores:  # which go on from chunk to chunk, as in vLLM
                scores["text_offset"] = [before + place for place in scores["text_offset"]]
                shown[index] += sum(map(len, scores["tokens"]))
            bodies.append(envelope.body([choice], usage, chunk=True))
        if output.finished:
            ends[number] = output
        return [_event(body) for body in bodies]

    try:
        for line in lines(*first):
            yield line
        async for number, output in stream:
            for line in lines(number, output):
                yield line
        if asked.include_usage:
            usage = usage_of(list(ends.values()), sum(map(envelope.shown_tokens, ends.values())))
            yield _event(envelope.body([], usage, chunk=True))
    except Exception as error:
        yield _event(body_of(error)[1])
    finally:
        await stream.aclose()
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`, which is cancelled when the client closes the connection."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ServeError(CLIENT_GONE, "the client has disconnected", kind="client_closed_request")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
