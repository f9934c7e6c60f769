"""The web application: its routes, who may use them, and how errors become responses."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.errors import NeverFitsError
from engine.runtime.async_engine import AsyncEngine
from engine.runtime.engine import Prompt
from engine.runtime.errors import EngineDeadError, RequestError
from engine.runtime.requests import RequestOutput
from engine.runtime.text import decode_ids, encode_text
from harness.serve import answers
from harness.serve.limits import BodyLimit
from harness.serve.metrics import ServerMetrics
from harness.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FieldError,
    StreamOptions,
    TokenizeRequest,
)

CUT = 8
_OPEN = frozenset(("/health", "/ping", "/metrics", "/version"))


class ApiKeys:
    """Answers 401 to a request without `Authorization: Bearer KEY`, where KEY is one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        kind, _, key = Request(scope).headers.get("authorization", "").partition(" ")
        found = [secrets.compare_digest(key.strip().encode(), one) for one in self._keys]
        if kind.lower() == "bearer" and any(found):
            await self._app(scope, receive, send)
            return
        message = "this server asks for an API key: send the header Authorization: Bearer KEY"
        body = {"message": message, "type": "authentication_error", "param": None, "code": 401}
        await JSONResponse({"error": body}, 401, {"www-authenticate": "Bearer"})(scope, receive, send)


OutputStream = AsyncGenerator[answers.NumberedOutput, None]


def _wrong(field: str, reason: str) -> answers.ServeError:
    """The client's error in a field of its request."""
    return answers.ServeError(400, f"{field}: {reason}", param=field)


@dataclass
class Server:
    """The state that all handlers share."""

    engine: AsyncEngine
    model: str
    most_requests: int  # in progress at once; further ones are refused
    started: int
    root: str | None = None
    # sampling parameters that requests may leave out
    defaults: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None  # of a sequence, whatever its request asks for
    under_way: int = 0
    longest_token: int = 0  # characters; 0: not known yet

    def check_model(self, name: str | None) -> None:
        """Raise ServeError (404) for a name that is not this model's."""
        if name is not None and name != self.model:
            reason = f"the model {name!r} does not exist; this server has {self.model!r}"
            raise answers.ServeError(404, reason, kind="not_found_error", param="model")

    def check_length(
        self, text: object, body: CompletionRequest | ChatRequest | TokenizeRequest, field: str
    ) -> None:
        """Raise ServeError (400) for a text that is too long to be encoded.

        That is one that no tokens of the longest sequence can hold, or, where it is cut or only counted, one of more
        than `CUT` times as many characters.
        """
        words = getattr(self.engine.facts.tokenizer, "get_vocab", None)
        longest = self.engine.facts.limits.max_model_len
        if not isinstance(text, str) or not words or not longest:
            return
        if self.longest_token == 0:
            self.longest_token = max(map(len, words()))
        runs = not isinstance(body, TokenizeRequest) and body.truncate_prompt_tokens is None
        most = longest * self.longest_token * (1 if runs else CUT)
        if len(text) > most:
            allowed = f"allowed are {most:,}, for {longest:,} tokens at most"
            raise _wrong(field, f"{len(text):,} characters; {allowed}")

    def card(self) -> dict[str, Any]:
        """The model in OpenAI's form."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.started,
            "owned_by": "pagetwin",
            "root": self.root or self.engine.facts.name,
            "parent": None,
            "max_model_len": self.engine.facts.limits.max_model_len,
        }

    async def answer(
        self, request: Request, body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt]
    ) -> Response:
        """Complete the prompts, as a whole answer or as a stream."""
        self.check_model(body.model)
        if not prompts:
            raise _wrong("prompt", "at least one is needed")
        if len(prompts) > self.most_requests:
            raise _wrong("prompt", f"{len(prompts)} prompts; this server takes {self.most_requests} at once")
        if body.priority and not self.engine.facts.uses_priority:
            reason = "says nothing to this server; start it with scheduler.policy=priority"
            raise _wrong("priority", f"{body.priority} {reason}")
        most, longest = body.most_tokens or 0, self.engine.facts.limits.max_model_len
        if longest and most > longest:  # as in vLLM, which ends others where the sequence does
            raise _wrong("max_tokens", f"{most:,}; prompt and output together take {longest} at most")
        params = body.sampling_params(self.defaults)
        if limit := self.most_tokens:
            params = replace(params, max_tokens=min(params.max_tokens or limit, limit))
        is_chat, options = isinstance(body, ChatRequest), body.answer_options()
        envelope = answers.Envelope(self.model, is_chat, self.engine.facts.tokenizer, options)
        name, salt = f"http-{uuid.uuid4().hex}", body.cache_salt or ""
        if given := request.headers.get("x-request-id", body.request_id):
            envelope = replace(envelope, answer_id=given)
        outputs = answers.merged(self.engine, name, prompts, params, priority=body.priority, cache_salt=salt)
        stream = self._counted(outputs, len(prompts))
        if not body.stream:
            done = await answers.unless_disconnected(request, _collect(stream))
            return JSONResponse(_whole(envelope, done, params.width))
        # errors of the request appear here, while the status can still be a 4xx
        first = await answers.unless_disconnected(request, anext(stream))
        asked = body.stream_options or StreamOptions()
        lines = answers.events(stream, first, envelope, params.width, asked)
        return StreamingResponse(lines, media_type="text/event-stream")

    async def _counted(self, stream: OutputStream, prompts: int) -> OutputStream:
        """The stream of outputs. Raises ServeError (503) if too many requests are in progress."""
        if self.under_way + prompts > self.most_requests:
            raise answers.ServeError(
                503, f"{self.under_way} requests are under way, the limit is {self.most_requests}; try again",
                kind="overloaded_error",
            )  # fmt: skip
        self.under_way += prompts
        try:
            async for item in stream:
                yield item
        finally:
            self.under_way -= prompts
            await stream.aclose()


async def _collect(stream: OutputStream) -> list[RequestOutput]:
    try:
        done = {number: output async for number, output in stream if output.finished}
    finally:
        await stream.aclose()
    return [done[number] for number in sorted(done)]


def _whole(envelope: answers.Envelope, done: Sequence[RequestOutput], width: int) -> dict[str, Any]:
    choices = [
        envelope.choice(output, one, number * width + one.index, chunk=False)
        for number, output in enumerate(done)
        for one in output.outputs
    ]
    body = envelope.body(choices, answers.usage_of(done, sum(map(envelope.shown_tokens, done))), chunk=False)
    return body | envelope.prompt_fields(done[0]) if envelope.chat else body


def build_app(
    engine: AsyncEngine,
    *,
    model: str,
    root: str | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    most_tokens: int | None = None,
    most_requests: int = 1024,
    api_keys: Sequence[str] = (),
) -> FastAPI:
    """The application for an engine, which it starts, observes and stops.

    `root` is the directory of the checkpoint; without one the name of the model takes its place. `defaults` are
    sampling parameters of requests that leave them out; no sequence gets more than `most_tokens`. With `api_keys` every
    address but those of health and metrics asks for one of them.
    """
    metrics = ServerMetrics(engine, model)
    server = Server(engine, model, most_requests, int(time.time()), root, defaults, most_tokens)
    tokenizer = engine.facts.tokenizer

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start(metrics.observe)
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="PageTwin", lifespan=lifespan)
    app.state.server = server
    install_error_handlers(app)
    app.add_middleware(BodyLimit)
    if api_keys:
        app.add_middleware(ApiKeys, keys=tuple(api_keys))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        prompts = body.prompts
        for one in prompts:
            server.check_length(one, body, "prompt")
        if not body.add_special_tokens:
            plain = partial(encode_text, tokenizer, add_special_tokens=False)
            prompts = [
                await engine.aside(partial(plain, one), len(one)) if isinstance(one, str) else one
                for one in prompts
            ]
        return await server.answer(request, body, prompts)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        text = "".join(one.text for one in body.messages)
        server.check_length(text, body, "messages")
        ids = await engine.aside(partial(body.prompt_ids, tokenizer), len(text))
        return await server.answer(request, body, [ids])

    _add_facts(app, server)
    _add_words(app, server)

    @app.get("/metrics")
    async def page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app


def _add_facts(app: FastAPI, server: Server) -> None:
    """The addresses that say what the server is and whether it lives, and the one that empties the prefix cache."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.card()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.card()

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        server.engine.reset_prefix_cache()
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("pagetwin")}

    @app.get("/ping")
    @app.post("/ping")
    @app.get("/health")
    async def health() -> Response:
        if server.engine.alive:
            return Response(status_code=200)
        return JSONResponse(answers.error_body(f"{server.engine.death}", 503, "service_unavailable"), 503)


def _add_words(app: FastAPI, server: Server) -> None:
    """The addresses of the tokenizer."""
    facts = server.engine.facts

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        text = body.prompt or "".join(one.text for one in body.messages or ())
        server.check_length(text, body, "prompt" if body.messages is None else "messages")
        ids = await server.engine.aside(partial(body.token_ids, facts.tokenizer), len(text))
        answer = {"count": len(ids), "max_model_len": facts.limits.max_model_len, "tokens": ids}
        names = [facts.tokenizer.decode([token]) for token in ids] if facts.tokenizer else None
        return answer | {"token_strs": names if body.return_token_strs else None}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.check_model(body.model)
        return {"prompt": decode_ids(facts.tokenizer, body.tokens)}


def _first_mistake(error: RequestValidationError) -> tuple[str, str | None]:
    """What is wrong in a body, and the field that is wrong."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {cause}", None
    if isinstance(cause, FieldError):
        return str(cause), cause.field
    places = [str(part) for part in first["loc"][1:]]
    message = str(cause) if isinstance(cause, ValueError) else str(first["msg"])
    return (f"{'.'.join(places)}: {message}", places[0]) if places else (message, None)


def install_error_handlers(app: FastAPI) -> None:
    """Make the application answer every error in OpenAI's format."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _first_mistake(error)
        return JSONResponse(answers.error_body(message, 400, "invalid_request_error", param), 400)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return JSONResponse(answers.error_body(str(error.detail), error.status_code, kind), error.status_code)

    @app.exception_handler(Exception)
    async def _any(request: Request, error: Exception) -> JSONResponse:
        status, body = answers.body_of(error)
        return JSONResponse(body, status)

    for known in (answers.ServeError, RequestError, NeverFitsError, EngineDeadError):
        app.add_exception_handler(known, _any)
