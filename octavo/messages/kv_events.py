"""KV events, as vLLM writes them on the wire: a batch is an array, each event in it a map with its ``type``.

``block_hashes`` are the last 64 bits of the hashes by which blocks are found, as unsigned integers.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"  # vLLM's name for the pool that attention reads, wherever it is


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Blocks that follow each other can be found from now on. ``token_ids`` are those of all of them.

    ``extra_keys``: of each block, what its hash covers besides tokens, e.g. its cache_salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Blocks can no longer be found."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """No block can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened in one step, at ``ts`` seconds since the epoch."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None
