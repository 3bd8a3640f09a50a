"""Which tenant a request belongs to: the name of its key, or what a trusted proxy says in a header.

The ``user`` field of a body is not believed: anybody can write anything there.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.access import current_caller
from octavo.entrypoints.openai.errors import error_response

_NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_told: ContextVar[str | None] = ContextVar("tenant_header", default=None)


def current_tenant() -> str:
    """The tenant's name; empty where nobody has a key."""
    told = _told.get()
    return current_caller.get().name if told is None else told


class TenantHeader:
    """The header ``name`` tells the tenant, and without it the key. It is for proxies that always set it themselves."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app, self._name = app, name.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == self._name]
        if given and not (len(given) == 1 and _NAME.fullmatch(given[0])):
            refusal = f"{self._name.decode()} must come once, as 1 to 64 letters, digits and .-_"
            await error_response(400, refusal, path=scope["path"])(scope, receive, send)
            return
        token = _told.set(given[0].decode() if given else None)
        try:
            await self.app(scope, receive, send)
        finally:
            _told.reset(token)
