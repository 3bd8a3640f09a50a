"""PrefixCache: the block pool, the index of what it has cached, and all that observes the index, made together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.event_log import EventLog, NullEventLog
from octavo.core.kv_cache.misses import Misses
from octavo.core.kv_cache.names import CacheObserver
from octavo.core.kv_cache.pins import PinLimits, PinTable
from octavo.core.kv_cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """What a block manager works with. ``pins``, ``misses`` and ``events`` observe the names of ``index``."""

    index: PrefixIndex
    pool: BlockPool
    pins: PinTable
    misses: Misses
    events: EventLog | NullEventLog


def make_prefix_cache(
    index: PrefixIndex,
    num_blocks: int,
    block_size: int,
    *,
    on_evict: Callable[[bytes, int], None],
    pin_limits: PinLimits,
    events: EventLog | NullEventLog,
    clock: Callable[[], float],
) -> PrefixCache:
    """Make a pool of ``num_blocks`` blocks for ``index``, and what observes its names, in the order in which it hears.

    ``on_evict``: see ``BlockPool``. A NullEventLog does not listen, so that it costs nothing.
    """
    pool = BlockPool(num_blocks, index, on_evict)
    misses, pins = Misses(index.names, block_size), PinTable(pool, pin_limits, clock)
    logs: list[CacheObserver] = [events] if isinstance(events, EventLog) else []
    index.names.observers = [*logs, misses, pins]
    return PrefixCache(index, pool, pins, misses, events)
