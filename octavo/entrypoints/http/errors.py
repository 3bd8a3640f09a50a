"""Which status each exception gets, what its message says, and the response that tells it in the path's dialect.

Messages are plain strings without lone surrogates, so a body can always be serialised, whatever the client sent.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from octavo.entrypoints.http.context import dialect, request_context
from octavo.entrypoints.http.field_errors import describe_fields
from octavo.entrypoints.server.access import NotAllowedError
from octavo.entrypoints.server.state import NotFoundError, NotReadyError
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

# how the access log calls a status, as OpenAI's bodies do
STATUS_NAMES = {
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


class Failure(NamedTuple):
    """Why a request failed. ``param`` is the field at fault, ``cause`` what the access log says of it."""

    status: int
    message: str
    param: str | None
    cause: str


def failure(status: int, message: str, param: str | None = None, *, limit: str | None = None) -> Failure:
    """The log gets the message of our own failures; of a refusal, whose message may quote the request, only the field
    at fault or the ``limit`` that was met.
    """
    kind, what = STATUS_NAMES.get(status, "Error"), limit or param
    cause = f"{kind}: {message}" if status >= 500 else f"{kind}: {what}" if what else kind
    return Failure(status, message.encode("utf-8", "replace").decode("utf-8"), param, cause)


def failure_of(error: BaseException) -> Failure:
    """What a client is told of an exception. An unforeseen one is logged with the id that the message carries."""
    if isinstance(error, ValidationError):
        return failure(400, str(error), error.parameter)
    if isinstance(error, NotFoundError):
        return failure(404, str(error), error.parameter)
    if isinstance(error, NotAllowedError):
        return failure(403, str(error))
    if isinstance(error, EngineDeadError | NotReadyError):
        return failure(503, str(error))
    if isinstance(error, DeadlineError):
        return failure(504, str(error))
    if isinstance(error, OverloadedError):
        return failure(429, str(error), limit=error.reason)
    if isinstance(error, RequestError):
        return failure(500, str(error))
    if isinstance(error, HTTPException):
        return failure(error.status_code, str(error.detail))
    error_id = uuid.uuid4().hex
    logger.error("error %s: %s", error_id, error, exc_info=error)
    return failure(500, f"internal error; the server's log has the details under id {error_id}")


def failure_response(scope: Scope, failed: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to the failed request of ``scope``; its access-log line gets the cause."""
    context = request_context(scope)
    context.note_cause(failed.cause)
    more = dict(headers or {})
    if failed.status in (429, 503):
        more.setdefault("Retry-After", "1")
    body = dialect(scope).error_body(failed.status, failed.message, failed.param, context.request_id)
    return Response(body, failed.status, more, "application/json")


def refusal(
    scope: Scope, status: int, message: str, param: str | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer that refuses the request of ``scope``."""
    return failure_response(scope, failure(status, message, param), headers)


async def _on_octavo_error(request: Request, error: Exception) -> Response:
    headers = {}
    if isinstance(error, DeadlineError | DeadlyRequestError):  # read by the official clients: it would end so again
        headers["x-should-retry"] = "false"
    if isinstance(error, OverloadedError) and error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return failure_response(request.scope, failure_of(error), headers)


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
    return refusal(request.scope, error.status_code, message, headers=headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI decodes nothing else, for a page of another origin could send that
        kind = request.headers.get("content-type", "")
        message = f"the body must come with Content-Type: application/json, got {kind[:100]!r}"
        return refusal(request.scope, 400, message)
    errors = error.errors()
    part = errors[0]["loc"][0]  # of the request
    sent = dict(request.query_params) if part == "query" else error.body
    found = [{**one, "loc": one["loc"][1:]} for one in errors if one["loc"][0] == part]
    return refusal(request.scope, 400, *describe_fields(found, sent))


def install_error_handlers(app: FastAPI) -> None:
    """Answer deliberate errors in the client's dialect; unforeseen ones are the ErrorShield's (guards.py)."""
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
