"""Error answers in a single shape: `{"error": {"message", "type", "param", "code"}}`. They never echo input.

On Anthropic's routes they also have `"type": "error"`, as its clients expect. An unknown exception is a bug: a bare 500
whose traceback the server logs.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from rayserve_moe.engine.adapters import UnknownAdapterError
from rayserve_moe.engine.admission import EngineBusyError, EngineRebuildingError
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.requests.records import RequestError

_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    422: "model_error",
    429: "overloaded_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
ANTHROPIC_PATH = "/v1/messages"
"""Prefix of Anthropic's paths."""
_RETRY_AFTER_S = {429: 1, 503: 5}


class ApiError(Exception):
    """Error answer with its HTTP status; `param` names the field at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict:
        """Return the error object."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPE_OF_STATUS.get(self.status, fallback)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        """Return the HTTP answer to a request for a path, with `Retry-After` if a retry may succeed."""
        headers = {"Retry-After": str(_RETRY_AFTER_S[self.status])} if self.status in _RETRY_AFTER_S else None
        if self.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        form = {"type": "error"} if path.startswith(ANTHROPIC_PATH) else {}
        return JSONResponse(form | self.body(), self.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the HTTP error for an exception of a lower layer."""
    match error:
        case ApiError():
            return error
        case UnknownAdapterError():
            return ApiError(404, str(error), param=error.param, code="adapter_not_found")
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case EngineBusyError():
            return ApiError(429, "the server is busy: its queue of waiting requests is full", code="queue_full")
        case EngineRebuildingError():
            return ApiError(503, str(error), code="rebuilding")
        case EngineStoppedError():
            return ApiError(503, "the engine is not running", code="engine_stopped")
        case HTTPException():
            return _routing_error(error)
        case ClientDisconnect():
            return ApiError(400, "the client closed the connection", code="client_disconnected")
    return ApiError(500, "internal error")


def path_of(scope: Scope) -> str:
    """Return the path of a request below the application's prefix."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of a route with an error object."""
    known = (
        ApiError,
        RequestError,
        EngineBusyError,
        EngineRebuildingError,
        EngineStoppedError,
        HTTPException,
        ClientDisconnect,
    )
    for kind in (*known, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    response = as_api_error(error).response(path_of(request.scope))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _routing_error(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "no such route", code="route_not_found")
    if error.status_code == 405:
        return ApiError(405, "this route does not take this method", code="method_not_allowed")
    return ApiError(error.status_code, HTTPStatus(error.status_code).phrase)
