"""Anthropic's error body, ``{"type": "error", "error": {type, message}, "request_id"}``."""

from __future__ import annotations

import msgspec

from octavo.entrypoints.http.context import HEADER, Dialect

PATH = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


def error_body(status: int, message: str, param: str | None, request_id: str | None) -> bytes:
    """The JSON body of an error with HTTP ``status``; the message has to name the parameter."""
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(AnthropicErrorBody(error=AnthropicErrorDetail(kind, message), request_id=request_id))


ANTHROPIC = Dialect(error_body, AnthropicErrorBody, id_headers=(HEADER, b"request-id"))
