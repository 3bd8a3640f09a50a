"""What stands between the socket and the routes: last-resort errors, the API key, the size of a request.

Plain ASGI, so that a stream passes through untouched and a disconnect is seen by the handler. Knows no route but the
open ones.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.access import STRANGER, KeyRing, current_caller
from octavo.entrypoints.access_log import current_outcome
from octavo.entrypoints.openai.errors import describe, error_response

REFUSAL = "missing or wrong API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"


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


class RootPath:
    """Routes are found with ``prefix`` before them and without, so it does not matter whether a proxy takes it away."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._prefix + "/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        await self.app(scope, receive, send)


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


class KeyGuard:
    """Every path but ``open_paths`` needs ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's client
    sends. Sets ``current_caller``.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self.app, self._keys, self._open = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        bearer = given.strip() if scheme.lower() == b"bearer" else b""
        caller = self._keys.find((bearer, headers.get(b"x-api-key", b"")))
        if caller is None and scope["path"] not in self._open:
            more = {"WWW-Authenticate": "Bearer"}
            await error_response(401, REFUSAL, path=scope["path"], headers=more)(scope, receive, send)
            return
        caller = caller or STRANGER
        if (outcome := current_outcome.get()) is not None:
            outcome.caller = caller.name
        token = current_caller.set(caller)
        try:
            await self.app(scope, receive, send)
        finally:
            current_caller.reset(token)


class RequestLimits:
    """More header fields than ``headers``, or more than ``header_bytes`` in all, are refused with 431; a body of more
    than ``body`` bytes with 413, by its declared length or as soon as it has grown too long. One that says its length
    in two ways is a 400: a proxy before us may have read it otherwise, and taken its end for a request.
    """

    def __init__(self, app: ASGIApp, body: int, headers: int, header_bytes: int) -> None:
        self.app, self._body, self._headers, self._header_bytes = app, body, headers, header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = f"at most {self._body} are allowed (the server's --max-body-bytes)"
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            refusal = "the request has both Content-Length and Transfer-Encoding; send one of them"
            more = {"Connection": "close"}
            await error_response(400, refusal, path=scope["path"], headers=more)(scope, receive, send)
            return
        if (size := sum(len(name) + len(value) for name, value in scope["headers"])) > self._header_bytes:
            refusal = f"the request's headers have {size} bytes; at most {self._header_bytes} are allowed"
            await error_response(431, refusal, path=scope["path"])(scope, receive, send)
            return
        if (count := len(scope["headers"])) > self._headers:
            refusal = f"the request has {count} header fields; at most {self._headers} are allowed"
            await error_response(431, refusal, path=scope["path"])(scope, receive, send)
            return
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._body):
            refusal = f"the body has {declared[:20].decode()} bytes; {limit}"
            await error_response(413, refusal, path=scope["path"])(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._body:
                raise HTTPException(413, f"the body has {received} bytes or more; {limit}")
            return message

        await self.app(scope, bounded, send)
