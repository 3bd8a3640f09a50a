"""Queries to the engine core: one module a query, each with a function ``answer(query, core)``.

A handler runs between two steps, while others may be in flight. It may read all of ``core``, and changes only what its
docstring says, and nothing at all when it raises. It returns the struct with which its query is answered. It raises
ValidationError for what is the query's fault, which becomes ``Reply.fault``; anything else it raises ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.sample_group import SOLO
from octavo.exceptions import ValidationError
from octavo.messages import (
    CacheOptions,
    CacheQuery,
    EngineCoreRequest,
    EvictPrefixes,
    ListPrefixes,
    PoolPicture,
    Query,
    RemovePin,
    Reply,
    RequestFault,
    ResetCache,
    RestorePrefix,
    SamplingParams,
    SavePrefixes,
    SetPin,
)
from octavo.utils.registry import resolve

HANDLERS: dict[type[Query[Any]], str] = {  # all queries that the core knows
    EvictPrefixes: "octavo.core.queries.evict_prefixes:answer",
    ListPrefixes: "octavo.core.queries.list_prefixes:answer",
    PoolPicture: "octavo.core.queries.pool_picture:answer",
    RemovePin: "octavo.core.queries.remove_pin:answer",
    ResetCache: "octavo.core.queries.reset_cache:answer",
    RestorePrefix: "octavo.core.queries.restore_prefix:answer",
    SavePrefixes: "octavo.core.queries.save_prefixes:answer",
    SetPin: "octavo.core.queries.set_pin:answer",
}


@dataclass(frozen=True, slots=True)
class CoreState:
    """The engine core as handlers see it. ``clock`` gives seconds.

    ``requests``: all unfinished ones, by id. ``running``: those of them that run, in order of admission.
    """

    kv: KVCacheManager
    requests: Mapping[str, Request]
    running: Sequence[Request]
    clock: Callable[[], float]


def reply_to(query: Query[Any], core: CoreState) -> Reply:
    """Have ``query`` handled. Never raises what is the query's fault."""
    if isinstance(query, CacheQuery):
        core.kv.cache.pins.expire()
    try:
        return Reply(resolve(HANDLERS[type(query)])(query, core))
    except ValidationError as error:
        return Reply(fault=RequestFault.of(error, "handling a query"))


def unrun_request(token_ids: Sequence[int], salt: str | None) -> Request:
    """A request for these tokens that is never run: its hashes are wanted."""
    source = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        cache=CacheOptions(salt=salt),
    )
    return Request(source, SOLO, limit=0, queued_time=0.0)
