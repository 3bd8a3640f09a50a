"""What a server that is about to end says to those who come now."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.openai.errors import error_response
from octavo.entrypoints.state import ServerState

REFUSAL = "the server is shutting down and finishes what it has begun; please ask another one, or again later"
RETRY_SECONDS = 5  # by then a successor may listen


class DrainGuard:
    """While ``state.draining``, whatever asks for work is refused with 503; looking and aborting are not.

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
            await error_response(503, REFUSAL, path=scope["path"], headers=more)(scope, receive, closing)
        else:
            await self.app(scope, receive, closing)
