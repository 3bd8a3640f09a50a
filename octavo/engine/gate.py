"""The gate before one engine core: which requests it is sent now, and in which order after a restart.

    open     a request is sent as it comes
    closed   there is no core: requests wait
    trial    a new core: the requests that the dead one had are sent first, each when the one before it has been
             answered. If the core dies again, it was the last one's doing. Then the others follow in order of arrival.
             So do they if the core does not begin with the request on trial for a while, though it works: it may lack
             a seat for long.

Knows nothing of cores, sockets or text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from octavo.engine.live_request import LiveRequest

PATIENCE = 5.0  # seconds in which a core that works must have begun with the request on trial


class Gate:
    """``submit`` sends a request to the core; it may end the request instead, but does not raise.

    ``on_trial`` is the request that the core must answer before it gets another; ``all_clear`` is called when no
    request is to be tried any more.
    ``clock`` gives seconds.
    """

    def __init__(
        self,
        submit: Callable[[LiveRequest], None],
        all_clear: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_trial: LiveRequest | None = None
        self._submit, self._all_clear, self._clock = submit, all_clear, clock
        self._give_up_at: float | None = None  # None: the core has begun with the request on trial
        self._is_open = True
        self._again: deque[LiveRequest] = deque()
        self._waiting: dict[LiveRequest, None] = {}  # in order of arrival

    @property
    def is_free(self) -> bool:
        """Whether a request that enters goes straight through."""
        return self._is_open and self.on_trial is None

    def enter(self, live: LiveRequest) -> None:
        """Send ``live``, now or when its turn comes."""
        if self.is_free:
            self._submit(live)
        else:
            self._waiting[live] = None

    def leave(self, live: LiveRequest) -> None:
        """``live`` has ended: nothing of it stays here, however long the core takes to come back."""
        self._waiting.pop(live, None)

    def close(self) -> None:
        """The core is gone."""
        self._is_open, self.on_trial = False, None

    def open(self, again: Iterable[LiveRequest]) -> None:
        """A new core is there; ``again``: what the dead one had and is to be computed anew, in order."""
        self._again = deque(again)
        self._is_open = True
        self._next()

    def heard(self, answered_ids: Collection[str], admitted_ids: Collection[str]) -> None:
        """The core has answered, or begun with, these sequences."""
        if self.on_trial is None:
            return
        tried_ids = set(self.on_trial.core_ids)
        if not tried_ids.isdisjoint(answered_ids):
            self._next()
        elif not tried_ids.isdisjoint(admitted_ids):
            self._give_up_at = None
        elif self._give_up_at is not None and self._clock() >= self._give_up_at:
            self._end_trial()

    def _next(self) -> None:
        self.on_trial = None
        while self._again:
            live = self._again.popleft()
            if not live.finished:
                self._submit(live)
            if not live.finished:
                self.on_trial, self._give_up_at = live, self._clock() + PATIENCE
                return
        self._end_trial()

    def _end_trial(self) -> None:
        """No request is on trial any more: those that wait are sent."""
        self.on_trial = None
        again, self._again = self._again, deque()
        for live in again:
            if not live.finished:
                self._submit(live)
        self._all_clear()
        waiting, self._waiting = self._waiting, {}
        for live in waiting:
            if not live.finished:
                self._submit(live)
