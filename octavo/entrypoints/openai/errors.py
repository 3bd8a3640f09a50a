"""Every error as OpenAI's body ``{"error": {message, type, param, code}}``, and which status each exception gets.

Knows nothing of routes. Messages are plain strings, so a body can always be serialised, whatever the client sent.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.state import NotReadyError, UnknownModelError
from octavo.exceptions import EngineDeadError, OctavoError, RequestError, ValidationError

logger = logging.getLogger("octavo.server")

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON body of an error with HTTP ``status``."""
    kind = TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode(ErrorBody(ErrorDetail(_encodable(message), kind, param, status)))


def _encodable(text: str) -> str:
    """``text`` without lone surrogates, which no JSON body can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def error_response(status: int, message: str, param: str | None = None) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else None
    return Response(error_body(status, message, param), status, headers, "application/json")


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """(status, message, param) of an exception. An unforeseen one is logged with the id that the message carries."""
    if isinstance(error, ValidationError):
        return 400, str(error), error.parameter
    if isinstance(error, UnknownModelError):
        return 404, str(error), "model"
    if isinstance(error, EngineDeadError | NotReadyError):
        return 503, str(error), None
    if isinstance(error, RequestError):
        return 500, str(error), None
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail), None
    error_id = uuid.uuid4().hex
    logger.error("error %s: %s", error_id, error, exc_info=error)
    return 500, f"internal error; the server's log has the details under id {error_id}", None


def describe_validation(errors: list[Any]) -> tuple[str, str | None]:
    """(message, field) of pydantic's errors: the first one, in words. The offending value is never echoed."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    field = path[0] if path else None
    others = sorted(
        {
            str(e["msg"]).removeprefix("Value error, ")
            for e in errors
            if [str(p) for p in e["loc"] if p != "body"][:1] == path[:1]
        }
    )
    return f"{field or 'body'}: {'; '.join(others)}", field


async def _on_octavo_error(request: Request, error: Exception) -> Response:
    return error_response(*describe(error))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI decodes nothing else, for a page of another origin could send that
        kind = request.headers.get("content-type", "")
        return error_response(400, f"the body must come with Content-Type: application/json, got {kind[:100]!r}")
    return error_response(400, *describe_validation(list(error.errors())))


def install_error_handlers(app: FastAPI) -> None:
    """Answer deliberate errors with OpenAI's body; unforeseen ones are the ErrorShield's (middleware.py)."""
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_octavo_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
