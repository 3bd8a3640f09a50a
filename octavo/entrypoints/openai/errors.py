"""Every error as a body that the client's library knows, and which status each exception gets.

OpenAI's body is ``{"error": {message, type, param, code}}``; under /v1/messages it is Anthropic's
``{"type": "error", "error": {type, message}, "request_id"}``. Messages are plain strings, so a body can always be
serialised, whatever the client sent.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from octavo.entrypoints.access import NotAllowedError
from octavo.entrypoints.access_log import note_cause
from octavo.entrypoints.openai.field_errors import describe_fields
from octavo.entrypoints.request_ids import current_request_id
from octavo.entrypoints.state import NotFoundError, NotReadyError
from octavo.exceptions import (
    DeadlineError,
    DeadlyRequestError,
    EngineDeadError,
    OctavoError,
    OverloadedError,
    RequestError,
    ValidationError,
)

logger = logging.getLogger("octavo.server")

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    421: "MisdirectedRequestError",
    429: "RateLimitError",
    431: "RequestHeadersTooLargeError",
    500: "InternalServerError",
    501: "UnsupportedEncodingError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """OpenAI's JSON body of an error with HTTP ``status``."""
    kind = TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode(ErrorBody(ErrorDetail(_encodable(message), kind, param, status)))


def anthropic_error_body(status: int, message: str) -> bytes:
    """Anthropic's JSON body of an error with HTTP ``status``; the message has to name the parameter."""
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail = AnthropicErrorDetail(kind, _encodable(message))
    return msgspec.json.encode(AnthropicErrorBody(error=detail, request_id=current_request_id.get()))


def _encodable(text: str) -> str:
    """``text`` without lone surrogates, which no JSON body can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    *,
    path: str = "",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer to a failed request for ``path``, which decides whose body it is."""
    _note(status, message, param)
    more = dict(headers or {})
    if status in (429, 503):
        more.setdefault("Retry-After", "1")
    anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    body = anthropic_error_body(status, message) if anthropic else error_body(status, message, param)
    return Response(body, status, more, "application/json")


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """(status, message, param) of an exception. An unforeseen one is logged with the id that the message carries."""
    status, message, param = _describe(error)
    _note(status, message, error.reason if isinstance(error, OverloadedError) else param)
    return status, message, param


def _note(status: int, message: str, param: str | None) -> None:
    """For the access log: what we say of our own failures; of refusals, which may quote the request, only the field or
    the limit, ``param``.
    """
    kind = TYPES.get(status, "Error")
    note_cause(f"{kind}: {message}" if status >= 500 else f"{kind}: {param}" if param else kind)


def _describe(error: BaseException) -> tuple[int, str, str | None]:
    if isinstance(error, ValidationError):
        return 400, str(error), error.parameter
    if isinstance(error, NotFoundError):
        return 404, str(error), error.parameter
    if isinstance(error, NotAllowedError):
        return 403, str(error), None
    if isinstance(error, EngineDeadError | NotReadyError):
        return 503, str(error), None
    if isinstance(error, DeadlineError):
        return 504, str(error), None
    if isinstance(error, OverloadedError):
        return 429, str(error), None
    if isinstance(error, RequestError):
        return 500, str(error), None
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail), None
    error_id = uuid.uuid4().hex
    logger.error("error %s: %s", error_id, error, exc_info=error)
    return 500, f"internal error; the server's log has the details under id {error_id}", None


async def _on_octavo_error(request: Request, error: Exception) -> Response:
    headers = {}
    if isinstance(error, DeadlineError | DeadlyRequestError):  # read by the official clients: it would end so again
        headers["x-should-retry"] = "false"
    if isinstance(error, OverloadedError) and error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return error_response(*describe(error), path=request.scope["path"], headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such route, or one that answers other methods (named in ``Allow``)."""
    assert isinstance(error, HTTPException)
    message, path = str(error.detail), request.scope["path"]
    headers = dict(error.headers or {})
    if error.status_code == 405:
        methods = {method for method in headers.get("Allow", "").split(", ") if method}
        for router in request.app.state.routers:  # two routes may share a path
            methods |= {m for r in router.routes if r.matches(request.scope)[0] != Match.NONE for m in r.methods}
        headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        message = f"{path[:200]} answers {headers['Allow']}, not {request.method[:20]}"
    elif error.status_code == 404:
        message = f"there is no route {request.method[:20]} {path[:200]}"
    return error_response(error.status_code, message, path=path, headers=headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    path = request.scope["path"]
    if isinstance(error.body, bytes):  # FastAPI decodes nothing else, for a page of another origin could send that
        kind = request.headers.get("content-type", "")
        refusal = f"the body must come with Content-Type: application/json, got {kind[:100]!r}"
        return error_response(400, refusal, path=path)
    errors = error.errors()
    part = errors[0]["loc"][0]  # of the request
    sent = dict(request.query_params) if part == "query" else error.body
    found = [{**one, "loc": one["loc"][1:]} for one in errors if one["loc"][0] == part]
    return error_response(400, *describe_fields(found, sent), path=path)


def install_error_handlers(app: FastAPI) -> None:
    """Answer deliberate errors with the client's body; unforeseen ones are the ErrorShield's (middleware.py)."""
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
