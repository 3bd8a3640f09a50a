"""PrefixCache: the block pool, the index of what it has cached, and all that observes the index, made together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.event_log import EventLog, NullEventLog
from octavo.core.kv_cache.misses import Misses
from octavo.core.kv_cache.names import Observer
from octavo.core.kv_cache.pins import PinLimits, PinTable
from octavo.core.kv_cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """What a block manager works with."""

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
    """Put ``num_blocks`` blocks behind ``index``. The order of its observers, which is that of hearing, stands here.

    ``on_evict``: see ``BlockPool``.
    """
    pool = BlockPool(num_blocks, index, on_evict)
    misses, pins = Misses(index.names, block_size), PinTable(pool, pin_limits, clock)
    observers: list[Observer] = [misses, pins]
    if isinstance(events, EventLog):
        observers.insert(0, events)
    index.names.observers = observers
    return PrefixCache(index, pool, pins, misses, events)
