"""What stands between the socket and the routes: which requests are let in, by whom, and how large they may be.

Plain ASGI, so that a stream passes through untouched and a disconnect is seen by the route. Knows no route but the open
ones. The application puts the guards in order, which matters: see ``build_app``.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.http.context import request_context
from octavo.entrypoints.http.errors import failure_of, failure_response, refusal
from octavo.entrypoints.server.access import STRANGER, KeyRing
from octavo.entrypoints.server.state import ServerState

NO_KEY = "missing or wrong API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
DRAINING = "the server is shutting down and finishes what it has begun; please ask another one, or again later"
RETRY_SECONDS = 5  # by then a successor may listen
ANY_HOST = "*"
LOCAL_HOSTS = ("localhost", "*.localhost")
SMALL_BODY = 64 * 1024  # bytes
TIMEOUT_HEADER = b"x-request-timeout"
_SECONDS = re.compile(rb"[0-9]{1,7}(\.[0-9]{1,6})?")
_TENANT = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class ErrorShield:
    """Outermost: an exception that no handler took becomes a 500 with an id, never a torn connection."""

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
            failed = failure_of(error)
            if scope["type"] == "http":
                request_context(scope).note_cause(failed.cause)
                if not started:
                    await failure_response(scope, failed)(scope, receive, send)


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
    sends. Tells the request's context who the caller is.
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
            await refusal(scope, 401, NO_KEY, headers=more)(scope, receive, send)
            return
        request_context(scope).caller = caller or STRANGER
        await self.app(scope, receive, send)


class SizeGuard:
    """More header fields than ``headers``, or more than ``header_bytes`` in all, are refused with 431; a body of more
    than ``body`` bytes with 413, by its declared length or as soon as it has grown too long. One that says its length
    in two ways is a 400: a proxy before us may have read it otherwise, and taken its end for a request.
    """

    def __init__(self, app: ASGIApp, body: int, headers: int, header_bytes: int) -> None:
        self.app, self._body, self._headers, self._header_bytes = app, body, headers, header_bytes
        self._limit = f"at most {body} are allowed (the server's --max-body-bytes)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if (refused := self._refusal(scope)) is not None:
            await refused(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._body:
                raise HTTPException(413, f"the body has {received} bytes or more; {self._limit}")
            return message

        await self.app(scope, bounded, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request whose headers alone show that it is too large."""
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            return refusal(scope, 400, message, headers={"Connection": "close"})
        if (size := sum(len(name) + len(value) for name, value in scope["headers"])) > self._header_bytes:
            message = f"the request's headers have {size} bytes; at most {self._header_bytes} are allowed"
            return refusal(scope, 431, message)
        if (count := len(scope["headers"])) > self._headers:
            return refusal(scope, 431, f"the request has {count} header fields; at most {self._headers} are allowed")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._body):
            return refusal(scope, 413, f"the body has {declared[:20].decode()} bytes; {self._limit}")
        return None


class DrainGuard:
    """While ``state.draining``, requests for work are refused with 503; looking and aborting are not.

    All answers that begin then close their connection, so that its client opens the next one elsewhere.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._state.draining:
            await self.app(scope, receive, send)
            return

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["method"] == "POST" and scope["path"] != "/ping":
            more = {"Retry-After": str(RETRY_SECONDS)}
            await refusal(scope, 503, DRAINING, headers=more)(scope, receive, closing)
        else:
            await self.app(scope, receive, closing)


class TimeoutHeader:
    """Reads ``X-Request-Timeout``; a value that is no number of seconds is a 400."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(TIMEOUT_HEADER) if scope["type"] == "http" else None
        if given is None:
            await self.app(scope, receive, send)
            return
        if not _SECONDS.fullmatch(given):
            message = f"X-Request-Timeout must be a number of seconds like 30 or 2.5, got {given[:40]!r}"
            await refusal(scope, 400, message)(scope, receive, send)
            return
        request_context(scope).timeout = float(given)
        await self.app(scope, receive, send)


class TenantHeader:
    """The header ``name`` tells the tenant, and without it the key. It is for proxies that always set it themselves."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app, self._name = app, name.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == self._name]
        if given and not (len(given) == 1 and _TENANT.fullmatch(given[0])):
            message = f"{self._name.decode()} must come once, as 1 to 64 letters, digits and .-_"
            await refusal(scope, 400, message)(scope, receive, send)
            return
        request_context(scope).proxied_tenant = given[0].decode() if given else None
        await self.app(scope, receive, send)


class BodyBudget:
    """Bounds the memory that the bodies of requests take together, for each is kept until its answer has ended.

    Refuses with 429 what would go beyond ``total`` bytes, or beyond ``share`` bytes of one caller. Small bodies are not
    counted, so that a caller who fills the budget keeps out large bodies alone.
    """

    def __init__(self, app: ASGIApp, total: int, share: int) -> None:
        self.app, self._total, self._share = app, total, share
        self._held: Counter[str] = Counter()  # bytes, by caller; no zeros

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller, size, counted = request_context(scope).caller.name, 0, 0

        async def counting() -> Message:
            nonlocal size, counted
            message = await receive()
            size += len(message.get("body", b""))
            if size > SMALL_BODY and size > counted:
                self._held[caller] += size - counted
                counted = size
                self._check(caller)
            return message

        try:
            await self.app(scope, counting, send)
        finally:
            self._held[caller] -= counted
            if not self._held[caller]:
                del self._held[caller]

    def _check(self, caller: str) -> None:
        own, all_together = self._held[caller], self._held.total()
        if own > self._share or all_together > self._total:
            held, limit = (own, self._share) if own > self._share else (all_together, self._total)
            whose = "your requests" if own > self._share else "requests"
            raise HTTPException(
                429, f"{whose} that are being answered have bodies of {held} bytes; at most {limit} are kept at once"
            )


def host_names(state: ServerState) -> Sequence[str]:
    """The names of ``state``'s server. Where a key is needed, a page has none, by whatever name it calls."""
    if state.config.allowed_hosts:
        return state.config.allowed_hosts
    return LOCAL_HOSTS if state.only_local and not state.keys.guarded else (ANY_HOST,)


class HostGuard:
    """Requests by other names than ``names`` get a 421. ``*.a.example`` stands for all names below a.example.

    It keeps out web pages that point a name of their own at this machine (DNS rebinding): a browser takes the server
    for such a page's origin, and neither CORS nor a content type helps; the Host header does, for it has the page's
    name. Addresses are always let in, and so is a request without the header, which no browser sends.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app = app
        self._names = {name.lower() for name in names if not name.startswith("*")}
        self._endings = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._any = ANY_HOST in names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._any:
            await self.app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"host" and not self._knows(host := _host(value.decode("latin-1"))):
                message = f"this server is not called {host[:100]!r}; the server's flag --allowed-hosts adds names"
                await refusal(scope, 421, message)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        return not host or host in self._names or host.endswith(self._endings) or _is_address(host)


def _host(header: str) -> str:
    """``header`` without its port, in lower case."""
    if header.startswith("["):  # an IPv6 address has colons of its own
        return header.partition("]")[0][1:].lower()
    return header.partition(":")[0].rstrip(".").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
