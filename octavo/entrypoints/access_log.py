"""One line for every HTTP request, when it has ended: what was asked by whom, how it ended, and why if not well.

Nothing of a body is in it. Why comes from ``current_outcome``, which those who refuse or fail a request fill in.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("octavo.access")

CLIENT_LEFT = "the client left"
MAX_PATH = 200


@dataclass
class Outcome:
    """Of one HTTP request, so far."""

    caller: str = ""
    cause: str | None = None  # of an end that is not a plain success


current_outcome: ContextVar[Outcome | None] = ContextVar("current_outcome", default=None)


def note_cause(cause: str) -> None:
    """Say why the current request fails; the first to say so is right."""
    outcome = current_outcome.get()
    if outcome is not None and outcome.cause is None:
        outcome.cause = cause


class AccessLog:
    """Plain ASGI: streams pass untouched. ``quiet`` paths get no line."""

    def __init__(self, app: ASGIApp, quiet: frozenset[str]) -> None:
        self.app, self._quiet = app, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet:
            await self.app(scope, receive, send)
            return
        outcome, start, status, complete = Outcome(), time.monotonic(), 0, False

        async def watch(message: Message) -> None:
            nonlocal status, complete
            status = message.get("status", status)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        token = current_outcome.set(outcome)
        try:
            await self.app(scope, receive, watch)
        finally:
            current_outcome.reset(token)
            if outcome.cause is None and (status == 499 or not complete):
                outcome.cause = CLIENT_LEFT
            _write(scope, status, 1000 * (time.monotonic() - start), outcome)


def _write(scope: Scope, status: int, milliseconds: float, outcome: Outcome) -> None:
    client = ":".join(map(str, scope.get("client") or ("local",)))
    fields = {
        "method": scope["method"][:20],
        "path": scope["path"][:MAX_PATH],
        "status": status,
        "duration_ms": round(milliseconds, 1),
        "client": client,
        "caller": outcome.caller,
    }
    who = f"{client} ({outcome.caller})" if outcome.caller else client
    text = f"{fields['method']} {fields['path']} {status} {milliseconds:.0f} ms {who}"
    if outcome.cause is not None:
        fields["cause"] = outcome.cause
        text += f": {outcome.cause}"
    failed = status >= 500 or (status < 400 and outcome.cause not in (None, CLIENT_LEFT))  # maybe in mid stream
    logger.log(logging.WARNING if failed else logging.INFO, "%s", text, extra={"fields": fields})
