"""Whose fault was it that a step raised? Its requests are in doubt until each has got a token again.

They start anew, and at most one that is in doubt runs at a time: if a step raises once more, it was that one's fault.
Knows nothing of blocks, queues or plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.request import Request


class Doubts:
    """The requests in doubt, by id. An AdmissionRule: at most one of them among the running."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        return request.request_id not in self._ids or not any(other.request_id in self._ids for other in running)

    def to_blame(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Of the requests of a step that raised: the one that was in doubt or alone, if there is one."""
        return requests if len(requests) == 1 else [one for one in requests if one.request_id in self._ids]

    def add(self, requests: Iterable[Request]) -> None:
        self._ids.update(request.request_id for request in requests)

    def clear(self, request: Request) -> None:
        """The request got a token, or is gone."""
        self._ids.discard(request.request_id)
