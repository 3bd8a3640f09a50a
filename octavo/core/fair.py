"""Weighted token fairness between tenants: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024).

A tenant's counter grows by the tokens that are computed for it, divided by its weight; an output token costs another
one when it is sampled, so it counts twice (the paper's w_q = 2, w_p = 1). The lowest counter starts next. A
tenant that comes back to the queue is lifted to the least of those in it (or to the last that left, if it is empty), so
no tenant saves up credit while idle. No seat is kept for a tenant: the engine never stands still while a request waits.
No running request is pushed out either; max_running is there to keep seats free.

Two tenants that have requests waiting all the time get service in proportion to their weights, but for a bounded
difference (theirs): twice the longest prompt, or twice the tokens of a batch. Within a tenant the
order is that of ``priority`` (then arrival). Prefixes that the cache supplies are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from octavo.config import SchedulerConfig
from octavo.core.priority import PriorityPolicy
from octavo.core.request import Request


class FairPolicy:
    """One queue for each tenant that waits.

    Of the running requests, the one that started last gives way. The budget of a step goes to the tenants in order of
    their counters: the request that started first may be anywhere in that order, but it has a token of each step and is
    never the victim.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._queues: dict[str, PriorityPolicy] = {}  # by tenant; none is empty
        self._counters: dict[str, float] = {}  # of tenants that wait, or are ahead of the floor
        self._floor = 0.0  # what counters are lifted to; never falls
        self._last: str | None = None  # the tenant that left the queue last

    # ---- the queue

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for name in self._order():
            yield from self._queues[name]

    def enqueue(self, request: Request) -> None:
        name = request.source.scheduling.tenant.name
        if name not in self._queues:
            self._lift(name)
            self._queues[name] = PriorityPolicy(self._config)
        self._queues[name].enqueue(request)

    def requeue(self, request: Request) -> None:
        self.enqueue(request)

    def peek(self, is_ready: Callable[[Request], bool]) -> Request | None:
        for name in self._order():
            if (request := self._queues[name].peek(is_ready)) is not None:
                return request
        return None

    def peers(self, first: Request) -> Iterator[Request]:
        return self._queues[first.source.scheduling.tenant.name].peers(first)

    def remove(self, request: Request) -> None:
        name = request.source.scheduling.tenant.name
        queue = self._queues[name]
        queue.remove(request)
        if not queue:
            self._raise_floor()
            del self._queues[name]
            self._last = name

    def _order(self) -> list[str]:
        """Tenants that wait, next one first; of equals the one whose next request came first."""
        return sorted(self._queues, key=lambda name: (self._counter(name), next(iter(self._queues[name])).number))

    # ---- the counters

    def _counter(self, name: str) -> float:
        return self._counters.get(name, self._floor)

    def _raise_floor(self) -> None:
        self._floor = max(self._floor, min(map(self._counter, self._queues), default=0.0))

    def _lift(self, name: str) -> None:
        """``name`` comes (back) to the queue. Counters that the floor has passed need not be kept."""
        if not self._queues and self._last is not None:
            self._floor = max(self._floor, self._counter(self._last))
        self._raise_floor()
        own = max(self._counter(name), self._floor)
        for one in [one for one, count in self._counters.items() if count <= self._floor and one not in self._queues]:
            del self._counters[one]
        self._counters[name] = own

    def served(self, request: Request, num_tokens: int) -> None:
        tenant = request.source.scheduling.tenant
        self._counters[tenant.name] = self._counter(tenant.name) + num_tokens / tenant.weight

    # ---- those that run

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=lambda request: self._counter(request.source.scheduling.tenant.name))

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def goes_first(self, waiting: Request, running: Sequence[Request]) -> bool:
        own = waiting.source.scheduling.tenant.name
        others = {request.source.scheduling.tenant.name for request in running} - {own}
        return any(self._counter(own) <= self._counter(name) for name in others)

    def displaced(self, waiting: Request, running: Sequence[Request]) -> Sequence[Request]:
        return ()
