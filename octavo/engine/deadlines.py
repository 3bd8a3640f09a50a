"""How long a request may wait, and how long it may take. Timers on one event loop; knows nothing of cores.

arrival ── max_queue_time ──▶ it has not begun: QueueTimeError      (429)
        ── its timeout ─────▶ it has not begun: QueueTimeError      (429: nothing was computed)
                            └ it runs:          DeadlineError       (504)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from octavo.config import QueueConfig
from octavo.engine.live_request import LiveRequest
from octavo.exceptions import DeadlineError, OctavoError, QueueTimeError, ValidationError

MAX_TIMEOUT = 1e6  # seconds


class Deadlines:
    """The limits of ``config``, and those that requests bring. ``clock`` gives seconds, as in arrival times."""

    def __init__(self, config: QueueConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue_time, self._longest = config.max_queue_time, config.generation_timeout

    def timeout(self, own: float | None) -> float | None:
        """Seconds that a request has which brings ``own``; None: as long as it takes. Raises ValidationError."""
        if own is not None and not 0 < own <= MAX_TIMEOUT:
            message = f"timeout must be more than 0 and at most {MAX_TIMEOUT:g} seconds, got {own:g}"
            raise ValidationError(message, parameter="timeout", value=own)
        given = [seconds for seconds in (own, self._longest or None) if seconds is not None]
        return min(given, default=None)

    def watch(self, live: LiveRequest, end: Callable[[LiveRequest, OctavoError], None]) -> list[asyncio.TimerHandle]:
        """Timers that call ``end`` with what the caller of ``live`` shall hear; cancel them when it has ended."""
        arrival_time, deadline = live.request.arrival_time, live.request.deadline

        def give_up() -> None:
            if live.waits:
                message = f"the request waited for {self._queue_time:g} s (--max-queue-time) in vain"
                end(live, QueueTimeError(message))

        def time_is_up() -> None:
            assert deadline is not None
            end(live, self.late(deadline - arrival_time, live.waits))

        loop, now, timers = asyncio.get_running_loop(), self._clock(), []
        if self._queue_time:
            timers.append(loop.call_later(arrival_time + self._queue_time - now, give_up))
        if deadline is not None:
            timers.append(loop.call_later(deadline - now, time_is_up))
        return timers

    def late(self, timeout: float, is_waiting: bool) -> OctavoError:
        """The error of a request that has not ended within its ``timeout``."""
        if is_waiting:
            message = f"the request waited for all of its timeout of {timeout:g} s; nothing was computed"
            return QueueTimeError(message, reason="timeout")
        return DeadlineError(f"the request was not finished within its timeout of {timeout:g} s")
