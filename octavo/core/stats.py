"""Counters of the scheduler since the last report. Knows no metric names."""

from __future__ import annotations


class SchedulerCounters:
    """Numbers that grow until they are taken."""

    __slots__ = ("admitted_ids", "num_deferred", "num_preemptions", "prefix_hits", "prefix_queries")

    def __init__(self) -> None:
        self.num_deferred = 0  # of the last plan; a state, not a counter
        self.reset()

    def reset(self) -> None:
        """Start again at zero."""
        self.num_preemptions = 0
        self.admitted_ids: list[str] = []
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """One request's prompt was looked up in the prefix cache."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_found
