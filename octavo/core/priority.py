"""Priority: the most urgent request goes first, and takes the place of a less urgent one that runs.

Lower numbers are more urgent; among equals, first come, first served. With ageing, a request gains one level for each
``priority_ageing`` seconds that it is old. All grow old at the same pace, so their order never changes, and a rank is a
constant: a request of priority p ranks like one of priority 0 that came p x ``priority_ageing`` seconds later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

from octavo.config import SchedulerConfig
from octavo.core.request import Request

Rank = tuple[float, float, int]


class PriorityPolicy:
    """Waiting and running requests are ranked alike; the last of the running gives way."""

    __slots__ = ("_ageing", "_waiting")

    def __init__(self, config: SchedulerConfig) -> None:
        self._ageing = config.priority_ageing
        self._waiting: list[Request] = []  # sorted

    def _rank(self, request: Request) -> Rank:
        priority, arrival_time = request.source.scheduling.priority, request.source.arrival_time
        if self._ageing:
            return priority * self._ageing + arrival_time, 0.0, request.number
        return priority, arrival_time, request.number

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def enqueue(self, request: Request) -> None:
        insort(self._waiting, request, key=self._rank)

    def requeue(self, request: Request) -> None:
        self.enqueue(request)

    def peek(self, is_ready: Callable[[Request], bool]) -> Request | None:
        return next(filter(is_ready, self._waiting), None)

    def peers(self, first: Request) -> Iterator[Request]:
        """Those of the same priority. With ageing no two are equal."""
        level = self._rank(first)[0]
        later = islice(self._waiting, bisect_left(self._waiting, self._rank(first), key=self._rank), None)
        return takewhile(lambda one: self._rank(one)[0] == level, later)

    def remove(self, request: Request) -> None:
        del self._waiting[bisect_left(self._waiting, self._rank(request), key=self._rank)]

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=self._rank)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=self._rank)

    def goes_first(self, waiting: Request, running: Sequence[Request]) -> bool:
        return any(self._is_urgent(waiting, request) for request in running)

    def displaced(self, waiting: Request, running: Sequence[Request]) -> Sequence[Request]:
        return [request for request in running if self._is_urgent(waiting, request)]

    def _is_urgent(self, waiting: Request, running: Request) -> bool:
        """By a whole level, so that equals do not push each other around."""
        return self._rank(waiting)[0] + (self._ageing or 1) <= self._rank(running)[0]

    def served(self, request: Request, num_tokens: int) -> None:
        """Urgency is not used up."""
