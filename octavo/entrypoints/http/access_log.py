"""One line for every HTTP request, when it has ended: what was asked by whom, how it ended, and why if not well.

Nothing of a body is in it. The cause is the request context's, which the code that refuses or fails a request notes.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.http.context import request_context
from octavo.entrypoints.server.context import RequestContext

logger = logging.getLogger("octavo.access")

CLIENT_LEFT = "the client left"
MAX_PATH = 200


class AccessLog:
    """Plain ASGI: streams pass untouched. ``quiet`` paths get no line."""

    def __init__(self, app: ASGIApp, quiet: frozenset[str]) -> None:
        self.app, self._quiet = app, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet:
            await self.app(scope, receive, send)
            return
        context, start, status, complete = request_context(scope), time.monotonic(), 0, False

        async def watch(message: Message) -> None:
            nonlocal status, complete
            status = message.get("status", status)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if status == 499 or not complete:
                context.note_cause(CLIENT_LEFT)
            _write(scope, status, 1000 * (time.monotonic() - start), context)


def _write(scope: Scope, status: int, milliseconds: float, context: RequestContext) -> None:
    client, caller = ":".join(map(str, scope.get("client") or ("local",))), context.caller.name
    fields = {
        "method": scope["method"][:20],
        "path": scope["path"][:MAX_PATH],
        "status": status,
        "duration_ms": round(milliseconds, 1),
        "client": client,
        "caller": caller,
    }
    who = f"{client} ({caller})" if caller else client
    text = f"{fields['method']} {fields['path']} {status} {milliseconds:.0f} ms {who}"
    if context.cause is not None:
        fields["cause"] = context.cause
        text += f": {context.cause}"
    failed = status >= 500 or (status < 400 and context.cause not in (None, CLIENT_LEFT))  # maybe in mid stream
    logger.log(logging.WARNING if failed else logging.INFO, "%s", text, extra={"fields": fields})
