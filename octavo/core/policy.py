"""Policies: which request goes first, and which one gives way. A policy owns the waiting queue.

It knows nothing of blocks or budgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile
from typing import Protocol

from octavo.config import SchedulerConfig
from octavo.core.request import Request


class Policy(Protocol):
    """A ranking of requests, seen as a queue, an order of service and a choice of victim.

    No livelock: of the running requests, the one ranked first is never the victim while another one runs. So a ranking
    must be strict: samples of one request were queued at the same time, but each has its own ``Request.number``.
    """

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests, next one first."""
        ...

    def enqueue(self, request: Request) -> None:
        """A new request waits."""
        ...

    def requeue(self, request: Request) -> None:
        """A preempted request waits again."""
        ...

    def peek(self, is_ready: Callable[[Request], bool]) -> Request | None:
        """The request to admit next, the first that is ready; it stays in the queue, as do those passed over."""
        ...

    def peers(self, first: Request) -> Iterator[Request]:
        """``first``, which waits, and the later ones that might as well start before it; in order."""
        ...

    def remove(self, request: Request) -> None:
        """``request`` waits no longer."""
        ...

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        """A copy of ``running`` (listed by time of admission), first to be served first."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of ``running`` (not empty) to preempt when blocks run out."""
        ...

    def goes_first(self, waiting: Request, running: Sequence[Request]) -> bool:
        """May ``waiting`` start before ``running`` get more than one token each of the step?"""
        ...

    def displaced(self, waiting: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Those of ``running`` that may be preempted so that ``waiting`` can start: all rank behind it."""
        ...

    def served(self, request: Request, num_tokens: int) -> None:
        """A step was planned that computes, or samples, ``num_tokens`` of ``request``."""
        ...


class FcfsPolicy:
    """First come, first served; the latest of the running gives way.

    Victims are taken from the end and put at the queue's front, so running + waiting stay in order of arrival.
    """

    __slots__ = ("_waiting",)

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def enqueue(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def requeue(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def peek(self, is_ready: Callable[[Request], bool]) -> Request | None:
        return next(filter(is_ready, self._waiting.values()), None)

    def peers(self, first: Request) -> Iterator[Request]:
        return dropwhile(lambda one: one is not first, self._waiting.values())

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        return tuple(running)

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def goes_first(self, waiting: Request, running: Sequence[Request]) -> bool:
        return False

    def displaced(self, waiting: Request, running: Sequence[Request]) -> Sequence[Request]:
        return ()

    def served(self, request: Request, num_tokens: int) -> None:
        """Only the order of arrival counts."""
