"""What KV caches of tests are made of: groups of layers, and tiers behind the pool."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv_transfer.chain import MakeTier, TierChain
from octavo.kv_transfer.connectors.disk.planner import DiskTier
from octavo.kv_transfer.connectors.host.planner import HostTier
from octavo.messages import KVSpec, KVTierInfo, kind_of


def kv_specs(windows: Iterable[int | None], bytes_per_token: int = 0) -> tuple[KVSpec, ...]:
    """A group for each window, None for full attention."""
    return tuple(KVSpec(kind=kind_of(window), bytes_per_token=bytes_per_token, window=window) for window in windows)


def host_tier(num_blocks: int, *, swaps: bool, disk: int = 0) -> TierChain:
    """Tiers with room for so many blocks. Preempted requests use the first one or not."""
    makers: list[MakeTier] = []
    if num_blocks > 0:
        host = KVTierInfo(capacity=num_blocks, block_bytes=1)
        makers.append(lambda emit: HostTier(host, emit, keeps_preempted=swaps))
    if disk > 0:
        makers.append(lambda emit: DiskTier(KVTierInfo(capacity=disk, block_bytes=1), emit))
    return TierChain(makers)
