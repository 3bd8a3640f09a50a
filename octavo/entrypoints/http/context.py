"""The front of the application: each HTTP request gets its RequestContext, and the dialect in which it is answered.

Both travel in the ASGI scope. The request's id is also set for log lines far below that speak of the request.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServerState
from octavo.utils.logs import current_request_id

HEADER = b"x-request-id"
CONTEXT, DIALECT = "octavo.context", "octavo.dialect"  # keys of the scope
_ACCEPTED = re.compile(rb"[!-~]{1,256}")  # anything else could break a log line or a header


@dataclass(frozen=True)
class Dialect:
    """How one API writes what the HTTP layer has to say.

    ``error_body`` makes a JSON body of status, message, the field at fault and the request's id; ``id_headers`` are the
    names under which a response carries that id; ``error_struct`` describes the body in the OpenAPI document.
    """

    error_body: Callable[[int, str, str | None, str | None], bytes]
    error_struct: type
    id_headers: tuple[bytes, ...] = (HEADER,)


def request_context(scope: MutableMapping[str, Any]) -> RequestContext:
    """The context that the front gave a request."""
    context: RequestContext = scope[CONTEXT]
    return context


def dialect(scope: MutableMapping[str, Any]) -> Dialect:
    """The dialect of the path that a request asks for."""
    found: Dialect = scope[DIALECT]
    return found


class Front:
    """Names each request by its ``X-Request-Id`` or a fresh id, which every response tells unless configured otherwise.

    ``dialect_of`` chooses by path. Plain ASGI: streams pass untouched.
    """

    def __init__(self, app: ASGIApp, state: ServerState, dialect_of: Callable[[str], Dialect]) -> None:
        self.app, self._state, self._dialect_of = app, state, dialect_of
        self._echo = state.config.enable_request_id_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()
        chosen = self._dialect_of(scope["path"])

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                labels = ((name, request_id) for name in chosen.id_headers)
                message["headers"] = [*message.get("headers", ()), *labels]
            await send(message)

        scope = {**scope, CONTEXT: RequestContext(self._state, request_id.decode()), DIALECT: chosen}
        token = current_request_id.set(request_id.decode())
        try:
            await self.app(scope, receive, labelled if self._echo else send)
        finally:
            current_request_id.reset(token)
