"""ResetCache: forget all prefixes, in the pool and in the tiers. Ends all pins; requests keep their blocks."""

from __future__ import annotations

from octavo.core.queries import CoreState
from octavo.messages import CacheCleared, ResetCache


def answer(query: ResetCache, core: CoreState) -> CacheCleared:
    """How many blocks were cached."""
    num_blocks = len(core.kv.index)
    core.kv.reset_prefix_cache()
    return CacheCleared(num_blocks)
