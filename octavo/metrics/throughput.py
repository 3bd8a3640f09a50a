"""The line in the log that says how busy the engine is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from octavo.messages import SchedulerStats
from octavo.metrics.stats import IterationStats


class ThroughputLog:
    """Sums up what happened since the last line. ``clock`` gives seconds."""

    def __init__(self, engine: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._stats = SchedulerStats()
        self._queries = self._hits = 0  # over the whole life: a rate of one interval says little
        self._was_busy = False
        self._restart()

    def _restart(self) -> None:
        self._since = self._clock()
        self._prompt_tokens = self._generation_tokens = 0
        self._refused: Counter[str] = Counter()  # requests, by limit

    def refuse(self, reason: str) -> None:
        """A request was refused because of the limit ``reason``."""
        self._refused[reason] += 1

    def record(self, stats: SchedulerStats | None, iteration: IterationStats) -> None:
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        if stats is not None:
            self._stats = stats
            self._queries += stats.prefix_cache_queries_delta
            self._hits += stats.prefix_cache_hits_delta

    def line(self) -> str | None:
        """The line for the time since the last call; None if nothing happened, but for one line after a busy time."""
        seconds = max(self._clock() - self._since, 1e-9)
        busy = bool(
            self._prompt_tokens or self._generation_tokens or self._stats.num_running or self._stats.num_waiting
        )
        refused = ", ".join(f"{count} ({reason})" for reason, count in self._refused.items())
        text = None
        if busy or self._was_busy or refused:
            text = (
                f"Engine {self._engine:03d}: "
                f"Avg prompt throughput: {self._prompt_tokens / seconds:.1f} tokens/s, "
                f"Avg generation throughput: {self._generation_tokens / seconds:.1f} tokens/s, "
                f"Running: {self._stats.num_running} reqs, Waiting: {self._stats.num_waiting} reqs, "
                f"KV cache usage: {100 * self._stats.kv_cache_usage:.1f}%, "
                f"Prefix cache hit rate: {100 * self._hits / max(self._queries, 1):.1f}%"
            ) + (f", Refused: {refused}" if refused else "")
        self._was_busy = busy
        self._restart()
        return text
