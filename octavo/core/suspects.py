"""Suspects: the requests of a step that raised. The scheduler finds out which of them is to blame.

They start anew, and at most one suspect runs at a time: if a step raises again, that one is to blame. A request is no
suspect any more once it has got a token.
Knows nothing of blocks, queues or plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.observers import Observer
from octavo.core.request import Request


class Suspects(Observer):
    """The ids of suspects. An AdmissionRule: it admits no suspect while another one runs."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        return request.request_id not in self._ids or not any(other.request_id in self._ids for other in running)

    def to_blame(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Of the requests of a step that raised: the suspects, or the only request."""
        return requests if len(requests) == 1 else [one for one in requests if one.request_id in self._ids]

    def add(self, requests: Iterable[Request]) -> None:
        self._ids.update(request.request_id for request in requests)

    def clear(self, request: Request) -> None:
        """The request got a token."""
        self._ids.discard(request.request_id)

    def finished(self, request: Request) -> None:
        self._ids.discard(request.request_id)
