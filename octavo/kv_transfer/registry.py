"""KV connectors by name, fastest first, and which of them a configuration asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from octavo.config import CacheConfig
from octavo.kv_transfer.base import BlockMemory, Emit, TierPlanner
from octavo.kv_transfer.chain import MakeTier, TierChain
from octavo.kv_transfer.costs import Costs
from octavo.kv_transfer.movers import Movers
from octavo.messages import KVTierInfo
from octavo.utils.registry import resolve

CONNECTORS = {
    "host": "octavo.kv_transfer.connectors.host",
    "disk": "octavo.kv_transfer.connectors.disk",
}


def _settings(cache: CacheConfig) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By connector asked for: what its planner and its mover are told, beside what they are about."""
    chosen: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    if cache.swap_space > 0:
        swaps = cache.preemption_mode == "swap"
        chosen["host"] = ({"keeps_preempted": swaps}, {"size": int(cache.swap_space * 2**30)})
    if cache.kv_cache_dir is not None:
        chosen["disk"] = ({}, {"folder": cache.kv_cache_dir, "size": cache.kv_cache_dir_size})
    return chosen


def make_movers(cache: CacheConfig, memory: BlockMemory, identity: str) -> Movers:
    """Open the tiers of ``cache`` for a pool. ``identity``: what decides about the bits of K and V.

    Raises ConfigError for a tier that cannot be had.
    """
    movers = {}
    for name, (_, told) in _settings(cache).items():
        movers[name] = resolve(f"{CONNECTORS[name]}.mover:make")(memory, identity, **told)
    return Movers(movers)


def tier_bytes(cache: CacheConfig) -> int:
    """Main memory that the tiers of ``cache`` take at most."""
    chosen = _settings(cache).items()
    return sum(resolve(f"{CONNECTORS[name]}.mover:memory_bytes")(**told) for name, (_, told) in chosen)


def make_planner(
    cache: CacheConfig, infos: Mapping[str, KVTierInfo], clock: Callable[[], float] = time.monotonic
) -> TierChain:
    """The scheduler's side of the tiers that were opened. ``clock`` gives seconds."""

    def maker(name: str, told: dict[str, Any]) -> MakeTier:
        def make(emit: Emit) -> TierPlanner:
            tier: TierPlanner = resolve(f"{CONNECTORS[name]}.planner:make")(infos[name], emit, **told)
            return tier

        return make

    chosen = [maker(name, told) for name, (told, _) in _settings(cache).items()]
    return TierChain(chosen, cache.block_size, Costs(clock))
