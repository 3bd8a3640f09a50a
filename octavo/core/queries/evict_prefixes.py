"""EvictPrefixes: forget cached blocks, in the tiers too. Changes no block that a request or a pin holds."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.prefix_tree import PrefixTree, blocks_of
from octavo.core.queries import CoreState
from octavo.messages import BlocksEvicted, EvictPrefixes, NotFound


def answer(query: EvictPrefixes, core: CoreState) -> BlocksEvicted | NotFound:
    """How many blocks were forgotten, of the prefix, of what follows it and of what only led to it."""
    pool, index = core.kv.pool, core.kv.index
    blocks: Sequence[Block] = pool.blocks
    if query.prefix is not None:
        blocks = blocks_of(PrefixTree(index.names.entries()).branch(query.prefix))
        if not blocks:
            return NotFound()
    unused = [block for block in blocks if block.is_cached and block.ref_count == 0]
    core.kv.tiers.chain.forget([block.key for block in unused if block.key is not None])
    for block in unused:
        index.remove(block)
        pool.discard(block)
    return BlocksEvicted(len(unused))
