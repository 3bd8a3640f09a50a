"""OpenAI's error body, ``{"error": {message, type, param, code}}``: that of every API but Anthropic's."""

from __future__ import annotations

import msgspec

from octavo.entrypoints.http.context import Dialect
from octavo.entrypoints.http.errors import STATUS_NAMES, Failure
from octavo.entrypoints.http.sse import encode_event

DONE = b"data: [DONE]\n\n"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(status: int, message: str, param: str | None = None) -> ErrorBody:
    """The body of an error with HTTP ``status``."""
    kind = STATUS_NAMES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return ErrorBody(ErrorDetail(message, kind, param, status))


def _encoded(status: int, message: str, param: str | None = None, request_id: str | None = None) -> bytes:
    return msgspec.json.encode(error_body(status, message, param))


OPENAI = Dialect(_encoded, ErrorBody)


def error_event(failed: Failure) -> bytes:
    """``data: {"error": ...}``, then [DONE]: the end of a stream that failed."""
    return encode_event(error_body(failed.status, failed.message, failed.param)) + DONE
