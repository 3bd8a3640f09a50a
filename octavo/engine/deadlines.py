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
from octavo.exceptions import DeadlineError, OctavoError, QueueTimeError, ValidationError

MAX_TIMEOUT = 1e6  # seconds


class Deadlines:
    """The limits of ``config``, and those that requests bring."""

    def __init__(self, config: QueueConfig) -> None:
        self._queue_time, self._longest = config.max_queue_time, config.generation_timeout

    def timeout(self, own: float | None) -> float | None:
        """Seconds that a request has which brings ``own``; None: as long as it takes. Raises ValidationError."""
        if own is not None and not 0 < own <= MAX_TIMEOUT:
            message = f"timeout must be more than 0 and at most {MAX_TIMEOUT:g} seconds, got {own:g}"
            raise ValidationError(message, parameter="timeout", value=own)
        given = [seconds for seconds in (own, self._longest or None) if seconds is not None]
        return min(given, default=None)

    def watch(
        self,
        arrival_time: float,
        deadline: float | None,
        is_waiting: Callable[[], bool],
        end: Callable[[OctavoError], None],
    ) -> list[asyncio.TimerHandle]:
        """Timers that call ``end`` with what the request's caller shall hear; cancel them when it has ended."""

        def give_up() -> None:
            if is_waiting():
                end(QueueTimeError(f"the request waited for {self._queue_time:g} s (--max-queue-time) in vain"))

        def time_is_up() -> None:
            assert deadline is not None
            end(self.late(deadline - arrival_time, is_waiting()))

        loop, now, timers = asyncio.get_running_loop(), time.monotonic(), []
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
