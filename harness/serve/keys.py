"""API keys: who may use the server. Health and metrics stay open, because probes and scrapers have no keys."""

import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
