"""Observers: objects that the scheduler tells what becomes of requests. None of them decides anything.

``factory.py`` lists those of an engine. Most write down numbers for SchedulerStats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.pinning import pin_wishes
from octavo.core.kv_cache.prefix_finder import Prefix
from octavo.core.request import Request


class Observer:
    """The scheduler calls each method just after what it is named for. Here they do nothing.

    A method may read the request and note facts in it, and changes no queue, no block table of a request and no plan.
    It never raises.
    """

    __slots__ = ()

    def queued(self, request: Request) -> None:
        """``request`` waits for the first time."""

    def admitted(self, request: Request, found: Prefix | None) -> None:
        """``request`` starts for the first time; ``found`` in caches, None if it reads none."""

    def preempted(self, request: Request) -> None:
        """``request`` has lost its blocks and waits again."""

    def drafted(self, request: Request, num_tried: int, num_right: int) -> None:
        """A step has tried ``num_tried`` drafts of ``request``; the first ``num_right`` were right."""

    def finished(self, request: Request) -> None:
        """``request`` has ended and is gone."""

    def take_stats(self) -> Mapping[str, Any]:
        """The fields of SchedulerStats that this observer knows, counted since the last call."""
        return {}


class Counters(Observer):
    """How many tokens were looked up and found, drafts tried, requests admitted and preempted."""

    __slots__ = ("_accepted", "_admitted_ids", "_external", "_lookups", "_num_drafts", "_num_preemptions")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_preemptions = 0
        self._num_drafts = [0, 0]  # times that a request tried some, tokens
        self._accepted: list[int] = []  # by position in the draft
        self._admitted_ids: list[str] = []
        self._lookups = [0, 0]  # prompt tokens, of these found in the block pool
        self._external = [0, 0]  # tokens that were not there, of these found in a tier

    def take_stats(self) -> Mapping[str, Any]:
        fields = {
            "prefix_cache_queries_delta": self._lookups[0],
            "prefix_cache_hits_delta": self._lookups[1],
            "external_prefix_cache_queries_delta": self._external[0],
            "external_prefix_cache_hits_delta": self._external[1],
            "num_preemptions_delta": self._num_preemptions,
            "num_drafts_delta": self._num_drafts[0],
            "num_draft_tokens_delta": self._num_drafts[1],
            "accepted_per_position_delta": self._accepted,
            "admitted_ids": self._admitted_ids,
        }
        self._reset()
        return fields

    def admitted(self, request: Request, found: Prefix | None) -> None:
        self._admitted_ids.append(request.request_id)
        if found is not None:
            num_missing = request.num_prompt_tokens - found.num_local
            self._lookups[0] += request.num_prompt_tokens
            self._lookups[1] += found.num_local
            self._external[0] += num_missing
            self._external[1] += found.num_external

    def preempted(self, request: Request) -> None:
        self._num_preemptions += 1

    def drafted(self, request: Request, num_tried: int, num_right: int) -> None:
        self._num_drafts[0] += 1
        self._num_drafts[1] += num_tried
        self._accepted += [0] * (num_right - len(self._accepted))
        for position in range(num_right):
            self._accepted[position] += 1


class PinWishes(Observer):
    """Sets the pins that a request's CacheOptions ask for."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def queued(self, request: Request) -> None:
        pin_wishes(self._kv, request)


class MissReports(Observer):
    """Notes why no more of a prompt was found in the prefix cache, for requests that ask."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._misses = kv.cache.misses

    def admitted(self, request: Request, found: Prefix | None) -> None:
        if request.source.report.cache_miss:
            num_found = None if found is None else found.num_tokens
            request.note(cache_miss=self._misses.explain(request, num_found))
