"""Tokens per minute. Knows nothing of requests."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Holds what may be used in a minute, and fills up at that rate.

    How long an answer becomes is known too late, so the bucket may be overdrawn; then :meth:`wait` until it is not.
    """

    __slots__ = ("_clock", "_level", "_per_second", "_time", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self._per_second, self._clock = per_minute, per_minute / 60.0, clock
        self._level, self._time = float(per_minute), clock()

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._time) * self._per_second)
        self._time = now

    def use(self, num_tokens: int) -> None:
        self._fill()
        self._level -= num_tokens

    @property
    def is_full(self) -> bool:
        self._fill()
        return self._level >= self.per_minute

    def wait(self) -> float:
        """Seconds until there is a token; 0.0: now."""
        self._fill()
        return 0.0 if self._level >= 1 else (1 - self._level) / self._per_second
