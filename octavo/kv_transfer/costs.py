"""Load or compute: which is quicker, as measured here. Knows neither tiers nor blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

WEIGHT = 0.25  # of a new measurement in the running mean
LEAST_TOKENS = 32  # a step of fewer tokens says nothing about prompts: reading the weights is what it costs
STALE_SECONDS = 30.0  # a measurement that nothing has followed for so long counts no more


class Costs:
    """Running means of seconds per token: of computing a prompt, and of loading from each source.

    What has not been measured lately counts as worth loading, so that it is measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._compute: float | None = None
        self._load: dict[str, tuple[float, float]] = {}  # mean, time of the last measurement

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed ``num_tokens`` in ``seconds``, without what it waited for loads."""
        if num_tokens >= LEAST_TOKENS and seconds > 0:
            self._compute = _mean(self._compute, seconds / num_tokens)

    def loaded(self, source: str, num_tokens: int, seconds: float) -> None:
        """``num_tokens`` were loaded from ``source``."""
        if num_tokens > 0:
            now = self._clock()
            mean, measured = self._load.get(source, (None, now))
            old = None if now - measured > STALE_SECONDS else mean
            self._load[source] = (_mean(old, seconds / num_tokens), now)

    def worth(self, source: str) -> bool:
        """Is loading from ``source`` no slower than computing?"""
        if self._compute is None or source not in self._load:
            return True
        mean, measured = self._load[source]
        return mean <= self._compute or self._clock() - measured > STALE_SECONDS


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
