"""Policies with which victims are met in other places than with those of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from octavo.core.policy import FcfsPolicy
from octavo.core.request import Request


class ByPriority(FcfsPolicy):
    """Ranks by (priority, arrival) but serves in order of admission: a victim may already be in the step's plan."""

    def peek(self, is_ready: Callable[[Request], bool]) -> Request | None:
        return min(filter(is_ready, self), key=_rank, default=None)

    def peers(self, first: Request) -> Iterator[Request]:
        later = (one for one in sorted(self, key=_rank) if _rank(one) >= _rank(first))
        return takewhile(lambda one: one.source.scheduling.priority == first.source.scheduling.priority, later)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=_rank)


class SortedByPriority(ByPriority):
    """Serves in the order in which it ranks, so a newcomer may go before those that run."""

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=_rank)


def _rank(request: Request) -> tuple[int, float, int]:
    return request.source.scheduling.priority, request.facts.queued_time, request.number
