"""Longest prefix first: of the requests that may start next, the one that finds most of its tokens in the cache.

Requests with one prefix then start one after the other while its blocks are there, instead of pushing each other's out.
(SGLang calls this order "lpm": Zheng et al., arXiv 2312.07104, section 3.) Knows no blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from octavo.core.policy import Policy
from octavo.core.request import Request, RequestStatus

WINDOW = 64  # requests that are looked at


class LongestPrefixFirst:
    """A Policy around another one, which decides all but this: which of its ``peers`` starts first.

    No request is overtaken by more than ``max_overtakes`` others. One that has run before is not overtaken at all, for
    it comes back to blocks that are still there. ``num_cached`` says how many tokens of a request are; asked again when
    a request has left the queue.
    """

    def __init__(self, base: Policy, max_overtakes: int, num_cached: Callable[[Request], int]) -> None:
        self._base, self._max_overtakes, self._num_cached = base, max_overtakes, num_cached
        self._overtakes: dict[str, int] = {}  # of those that wait and have been overtaken
        self._known: dict[str, int] = {}  # what num_cached said
        self._chosen: Request | None = None
        self._passed: Sequence[Request] = ()  # those that it will overtake if it starts

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._base)

    def enqueue(self, request: Request) -> None:
        self._base.enqueue(request)

    def requeue(self, request: Request) -> None:
        self._known.clear()
        self._base.requeue(request)

    def peek(self, is_ready: Callable[[Request], bool]) -> Request | None:
        first = self._base.peek(is_ready)
        if first is None:
            return None
        candidates: list[Request] = []
        for one in filter(is_ready, islice(self._base.peers(first), WINDOW)):
            candidates.append(one)
            if not self._may_be_overtaken(one):
                break
        cached = [self._cached(one) for one in candidates]
        place = cached.index(max(cached))
        self._chosen, self._passed = candidates[place], candidates[:place]
        return self._chosen

    def _may_be_overtaken(self, request: Request) -> bool:
        has_run = request.status is RequestStatus.PREEMPTED or request.holds_blocks
        return not has_run and self._overtakes.get(request.request_id, 0) < self._max_overtakes

    def _cached(self, request: Request) -> int:
        if request.request_id not in self._known:
            self._known[request.request_id] = self._num_cached(request)
        return self._known[request.request_id]

    def remove(self, request: Request) -> None:
        if request is self._chosen:
            for one in self._passed:
                self._overtakes[one.request_id] = self._overtakes.get(one.request_id, 0) + 1
        self._chosen, self._passed = None, ()
        self._overtakes.pop(request.request_id, None)
        self._known.clear()
        self._base.remove(request)

    def peers(self, first: Request) -> Iterator[Request]:
        return self._base.peers(first)

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        return self._base.order(running)

    def victim(self, running: Sequence[Request]) -> Request:
        return self._base.victim(running)

    def goes_first(self, waiting: Request, running: Sequence[Request]) -> bool:
        return self._base.goes_first(waiting, running)

    def displaced(self, waiting: Request, running: Sequence[Request]) -> Sequence[Request]:
        return self._base.displaced(waiting, running)

    def served(self, request: Request, num_tokens: int) -> None:
        self._base.served(request, num_tokens)


def by_prefix(policy: Policy, max_overtakes: int, num_cached: Callable[[Request], int]) -> Policy:
    """``policy``, or, where ``max_overtakes`` is not 0, a :class:`LongestPrefixFirst` around it."""
    return LongestPrefixFirst(policy, max_overtakes, num_cached) if max_overtakes > 0 else policy
