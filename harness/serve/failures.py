"""Errors as the OpenAI interface spells them: what a client did wrong is 4xx, what broke here is 5xx."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.core.errors import NeverFitsError
from engine.runtime.errors import EngineDeadError, ParamsError, RequestError

CLIENT_GONE = 499  # nobody reads the answer; the code that nginx gives this


class ServeError(Exception):
    """An error with its status."""

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


def error_body(message: str, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """The body that OpenAI clients read."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def status_of(error: Exception) -> tuple[int, str, str | None]:
    """HTTP status, kind, and the parameter at fault."""
    if isinstance(error, ServeError):
        return error.status, error.kind, error.param
    if isinstance(error, ParamsError):
        return 400, "invalid_request_error", error.field
    if isinstance(error, RequestError | NeverFitsError):
        return 400, "invalid_request_error", None
    if isinstance(error, EngineDeadError):
        return 503, "service_unavailable", None
    return 500, "server_error", None


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of any error."""
    status, kind, param = status_of(error)
    return status, error_body(str(error), status, kind, param)


def install(app: FastAPI) -> None:
    """Make the application answer every error in this form."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        return JSONResponse(error_body(message, 400, "invalid_request_error", place or None), 400)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return JSONResponse(error_body(str(error.detail), error.status_code, kind), error.status_code)

    @app.exception_handler(Exception)
    async def _any(request: Request, error: Exception) -> JSONResponse:
        status, body = body_of(error)
        return JSONResponse(body, status)

    for known in (ServeError, RequestError, NeverFitsError, EngineDeadError):
        app.add_exception_handler(known, _any)
