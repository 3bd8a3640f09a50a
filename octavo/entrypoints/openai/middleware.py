"""What stands between the socket and the routes: last-resort errors, the API key, the size of a body.

Plain ASGI, so that a stream passes through untouched and a disconnect is seen by the handler. Knows no route but the
open ones.
"""

from __future__ import annotations

import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.openai.errors import describe, error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
MAX_BODY_BYTES = 10 * 1024 * 1024


class ErrorShield:
    """Outermost: an exception that nobody handled becomes a 500 with an id, never a torn connection."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            status, message, param = describe(error)
            if not started and scope["type"] == "http":
                await error_response(status, message, param, path=scope["path"])(scope, receive, send)


class HeadAsGet:
    """HEAD is GET without the body, on every route; the server below drops what is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def bodiless(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, bodiless)


class ApiKeyGuard:
    """Every path but OPEN_PATHS needs ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's client sends.

    The comparison takes constant time.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app, self._expected = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            bearer = given.strip() if scheme.lower() == b"bearer" else b""
            offered = (bearer, headers.get(b"x-api-key", b""))
            if not sum(hmac.compare_digest(key, self._expected) for key in offered):
                await error_response(401, "missing or wrong API key", path=scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """A body over ``limit`` bytes is refused with 413, by its declared length or as soon as it has grown too long."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = f"the body is larger than {self.limit} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.limit:
            await error_response(413, refusal, path=scope["path"])(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                raise HTTPException(413, refusal)
            return message

        await self.app(scope, bounded, send)
