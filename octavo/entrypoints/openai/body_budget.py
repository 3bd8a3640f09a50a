"""How much memory the bodies of requests may take together: each is kept until its answer has ended.

Small ones are not counted, so that whoever fills the budget keeps out large bodies alone.
"""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.access import current_caller

SMALL = 64 * 1024  # bytes


class BodyBudget:
    """Refuses with 429 what would go beyond ``total`` bytes, or beyond ``share`` bytes of one caller."""

    def __init__(self, app: ASGIApp, total: int, share: int) -> None:
        self.app, self._total, self._share = app, total, share
        self._held: Counter[str] = Counter()  # bytes, by caller; no zeros

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller, size, counted = current_caller.get().name, 0, 0

        async def counting() -> Message:
            nonlocal size, counted
            message = await receive()
            size += len(message.get("body", b""))
            if size > SMALL and size > counted:
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
