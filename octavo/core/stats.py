"""Counters of the scheduler since the last report. Knows no metric names."""

from __future__ import annotations

from typing import Any


class SchedulerCounters:
    """Numbers that grow until they are taken."""

    __slots__ = (
        "accepted_per_position",
        "admitted_ids",
        "external_hits",
        "external_queries",
        "num_draft_tokens",
        "num_drafts",
        "num_preemptions",
        "prefix_hits",
        "prefix_queries",
    )

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_per_position: list[int] = []
        self.admitted_ids: list[str] = []
        self.prefix_queries = 0  # prompt tokens looked up,
        self.prefix_hits = 0  # of these, found in the pool;
        self.external_queries = 0  # tokens that were not there,
        self.external_hits = 0  # of these, found in a tier

    def take(self) -> dict[str, Any]:
        """Their fields of SchedulerStats; the counters start again at zero."""
        fields = {
            "prefix_cache_queries_delta": self.prefix_queries,
            "prefix_cache_hits_delta": self.prefix_hits,
            "external_prefix_cache_queries_delta": self.external_queries,
            "external_prefix_cache_hits_delta": self.external_hits,
            "num_preemptions_delta": self.num_preemptions,
            "num_drafts_delta": self.num_drafts,
            "num_draft_tokens_delta": self.num_draft_tokens,
            "accepted_per_position_delta": self.accepted_per_position,
            "admitted_ids": self.admitted_ids,
        }
        self._reset()
        return fields

    def count_lookup(self, num_tokens: int, num_found: int, num_external: int) -> None:
        """One request's prompt was looked up in the prefix cache, what was missing in the tiers behind it."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_found
        self.external_queries += num_tokens - num_found
        self.external_hits += num_external

    def count_drafts(self, num_tokens: int, num_right: int) -> None:
        """One request has tried so many draft tokens, of which so many were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        accepted = self.accepted_per_position
        accepted += [0] * (num_right - len(accepted))
        for position in range(num_right):
            accepted[position] += 1
