"""How long a client wants to wait: the body's ``timeout``, or a header, in seconds; and since when."""

from __future__ import annotations

import re
import time
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.openai.errors import error_response

HEADER = b"x-request-timeout"
_SECONDS = re.compile(rb"[0-9]{1,7}(\.[0-9]{1,6})?")
_told: ContextVar[float | None] = ContextVar("request_timeout", default=None)
arrival_time: ContextVar[float | None] = ContextVar("arrival_time", default=None)


def note_arrival() -> None:
    """The request is here in full: time spent on reading it counts as its own from now on."""
    arrival_time.set(time.monotonic())


def shortest(own: float | None) -> float | None:
    """The shorter of the body's time-out and the header's; None if there is neither."""
    return min((seconds for seconds in (own, _told.get()) if seconds is not None), default=None)


class TimeoutHeader:
    """Reads ``X-Request-Timeout``; a value that is no number of seconds is a 400."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(HEADER) if scope["type"] == "http" else None
        if given is None:
            await self.app(scope, receive, send)
            return
        if not _SECONDS.fullmatch(given):
            refusal = f"X-Request-Timeout must be a number of seconds like 30 or 2.5, got {given[:40]!r}"
            await error_response(400, refusal, path=scope["path"])(scope, receive, send)
            return
        token = _told.set(float(given))
        try:
            await self.app(scope, receive, send)
        finally:
            _told.reset(token)
