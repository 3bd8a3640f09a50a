"""How a route reads its body, and finds what else is known of its request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.http.context import Dialect, request_context
from octavo.entrypoints.server.access import NotAllowedError
from octavo.entrypoints.server.context import RequestContext
from octavo.exceptions import ValidationError

IGNORED_FIELDS = "x-octavo-ignored-fields"
SHOWN_NAMES, SHOWN_NAME = 20, 64  # names in the header, and characters of one
LARGE_BODY = 64 * 1024  # bytes
MAX_VALUES = 300_000  # arrays, objects and strings in one body: a third of a second to decode, at worst
_VALUES = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[{]', re.DOTALL)  # a string, whole or cut off, or an opening


@dataclass(frozen=True)
class Api:
    """One API of the server: its routes, the structs that they send, and how it says that a request failed."""

    router: APIRouter
    answers: tuple[Any, ...]
    dialect: Dialect


def check_number_of_values(body: bytes) -> None:
    """Refuse what would hold up all requests: decoding takes the interpreter's lock, whatever thread it is done on.

    Raises HTTPException (400) for more than MAX_VALUES arrays, objects and strings, before they are made.
    """
    if body.count(b"[") + body.count(b"{") + body.count(b'"') <= MAX_VALUES:
        return
    if any(True for _ in islice(_VALUES.finditer(body), MAX_VALUES, None)):
        raise HTTPException(400, f"the body has more than {MAX_VALUES} arrays, objects and strings")


class JsonRequest(Request):
    """Reads JSON with bounded nesting and size, no lone surrogates; NaN and Infinity pass, for validation to name."""

    async def json(self) -> Any:
        coding = self.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            refusal = f"the body must come as it is, without a Content-Encoding, got {coding[:40]!r}"
            raise HTTPException(415, refusal, {"Accept-Encoding": "identity"})
        body = await self.body()
        context = request_context(self.scope)
        context.arrival_time, context.large_body = time.monotonic(), len(body) > LARGE_BODY
        check_number_of_values(body)
        try:
            return from_json(body, allow_inf_nan=True, cache_strings=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """A route whose body is read by :class:`JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            response = await handler(JsonRequest(request.scope, request.receive))
            if ignored := getattr(request.state, "ignored_fields", None):
                response.headers[IGNORED_FIELDS] = ignored
            return response

        return handle


def note_ignored(request: Request, names: Sequence[str]) -> None:
    """Tell the client which fields of its request have no effect, in a header of the answer.

    Raises ValidationError, with ``--strict``, for the first of them.
    """
    if not names:
        return
    if context_of(request).server.config.strict:
        raise ValidationError(
            f"unknown field {names[0][:SHOWN_NAME]!r}: this server refuses fields that have no effect (--strict)",
            parameter=names[0][:SHOWN_NAME],
        )
    shown = [quote(name[:SHOWN_NAME], safe="._-") for name in names[:SHOWN_NAMES]]
    more = len(names) - len(shown)
    request.state.ignored_fields = ", ".join([*shown, f"and {more} more"] if more else shown)


def require_admin(request: Request) -> None:
    """Dependency of a route for administrators. Raises NotAllowedError (403) for other callers."""
    if not context_of(request).caller.admin:
        raise NotAllowedError("this needs the administrator's key (the server's flag --admin-api-key)")


def context_of(request: Request) -> RequestContext:
    """What is known of ``request`` besides its body."""
    return request_context(request.scope)
