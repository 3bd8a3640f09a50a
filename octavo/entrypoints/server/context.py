"""What is known of one request besides its body: who sent it, when, and how long they want to wait. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.entrypoints.server.access import ANYBODY, Caller
from octavo.entrypoints.server.state import ServerState


@dataclass(slots=True)
class RequestContext:
    """One request. The HTTP layer fills it in, guard by guard, and the routes pass it on.

    ``arrival_time`` is in ``time.monotonic()`` seconds: the time spent on reading a body counts as the client's own.
    ``cause`` says, for the access log, why the request did not simply succeed.
    """

    server: ServerState
    request_id: str | None = None  # the client's, or a fresh one; a label that two requests may share
    caller: Caller = ANYBODY
    proxied_tenant: str | None = None  # that the header of a trusted proxy names
    timeout: float | None = None  # seconds, of the header X-Request-Timeout
    arrival_time: float | None = None
    large_body: bool = False  # so large that work on it leaves the event loop
    cause: str | None = None

    @property
    def tenant(self) -> str:
        """Whom the request belongs to; empty where no key is needed. The body's ``user`` proves nothing."""
        return self.caller.name if self.proxied_tenant is None else self.proxied_tenant

    def shortest_timeout(self, own: float | None) -> float | None:
        """The shorter of ``own``, which is the body's, and the header's, in seconds; None if there is neither."""
        return min((seconds for seconds in (own, self.timeout) if seconds is not None), default=None)

    def note_cause(self, cause: str) -> None:
        """Say why the request fails; the first cause stays."""
        if self.cause is None:
            self.cause = cause
