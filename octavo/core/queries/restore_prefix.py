"""RestorePrefix: load what the tiers have of a prompt into free blocks, which are cached then."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.names import HASH_BYTES
from octavo.core.queries import CoreState, unrun_request
from octavo.core.request import Request
from octavo.exceptions import ValidationError
from octavo.messages import BlocksRestored, RestorePrefix


def answer(query: RestorePrefix, core: CoreState) -> BlocksRestored:
    """How many blocks are loaded: those missing of the longest prefix that tiers have; 0 if so many are not free.

    Raises ValidationError if there are no tiers.
    """
    kv, pool, chain = core.kv, core.kv.pool, core.kv.tiers.chain
    if not chain:
        raise ValidationError(
            "nothing here keeps KV blocks outside the pool; start the server with --kv-cache-dir or --swap-space",
            parameter="prompt",
        )
    request = unrun_request(query.prompt_token_ids, query.cache_salt)
    wanted, cached = _obtainable(request, core), kv.index.names.blocks
    here = {key: cached[key] for key in wanted if key in cached}
    keys = [key for key in wanted if key not in here]
    pool.acquire(here.values())
    if len(keys) > pool.num_free:
        keys = []
    chain.pin(keys)  # what is evicted now goes to a tier, and must not push them out
    blocks = pool.allocate(len(keys))
    kv.tiers.reused(blocks)
    for key, block in zip(keys, blocks, strict=True):
        chain.load(key, block.block_id)
        kv.tiers.fills(block, request)
    found = here | dict(zip(keys, blocks, strict=True))
    held = {key: found[key] for key in wanted if key in found}  # in order
    kv.adopt(request, held)
    chain.release(keys)
    pool.free(reversed(held.values()))
    return BlocksRestored(len(blocks))


def _obtainable(request: Request, core: CoreState) -> Sequence[bytes]:
    """Keys of the blocks of the longest prefix of ``request`` of which each is in the pool or in a tier."""
    cached, in_tier = core.kv.index.names.blocks, core.kv.tiers.chain.has
    hashes: Sequence[bytes] = request.hashes(core.kv.block_size)
    rows = {row_hash: row for row, row_hash in enumerate(hashes)}
    while hashes:
        keys = core.kv.keys(hashes)
        missing = next((key for key in keys if key not in cached and not in_tier(key)), None)
        if missing is None:
            return keys
        hashes = hashes[: rows[missing[:HASH_BYTES]]]  # a longer one needs that block too
    return ()
