"""The id of an HTTP request: its own ``X-Request-Id``, or a fresh one; told to the client with every response.

The id is ambient (a context variable), so that a log line far below can name the request it speaks of. Ids are only
labels: two requests may bring the same one.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.utils.logs import current_request_id

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"  # where Anthropic's client looks
_ACCEPTED = re.compile(rb"[!-~]{1,256}")  # anything else could break a log line or a header


class RequestIds:
    """Sets ``current_request_id``; with ``echo`` every response carries it. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp, *, echo: bool = True) -> None:
        self.app, self.echo = app, echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = (HEADER, ANTHROPIC_HEADER) if scope["path"].startswith("/v1/messages") else (HEADER,)
                message["headers"] = [*message.get("headers", ()), *((name, request_id) for name in names)]
            await send(message)

        token = current_request_id.set(request_id.decode())
        try:
            await self.app(scope, receive, labelled if self.echo else send)
        finally:
            current_request_id.reset(token)
