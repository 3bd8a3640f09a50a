"""PoolPicture: the state of every block, and the block tables. Changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from octavo.core.kv_cache.block import Block
from octavo.core.queries import CoreState
from octavo.messages import BlockPicture, BlockState, PoolPicture, PoolState

KEY_BYTES = 8  # shown of a block's key


def answer(query: PoolPicture, core: CoreState) -> PoolState:
    """All blocks, and the tables of the requests that have one."""
    kv = core.kv
    tables = {key: kv.block_ids(request) for key, request in core.requests.items() if request.holds_blocks}
    groups = {block_id: entry % kv.num_groups for table in tables.values() for entry, block_id in enumerate(table)}
    blocks = [_picture(block, groups.get(block.block_id)) for block in kv.pool.blocks]
    counts = Counter(one.state for one in blocks)
    return PoolState(
        blocks=blocks,
        num_blocks={state: counts[state] for state in get_args(BlockState)},
        tables=tables,
        block_size=kv.block_size,
        num_groups=kv.num_groups,
    )


def _picture(block: Block, group: int | None) -> BlockPicture:
    """``group``: according to the block tables, None if the block is in none."""
    if block.block_id == 0:
        return BlockPicture("null", 0, None, b"")
    entry = block.entry
    state: BlockState = "referenced" if block.ref_count else "free" if entry is None else "cached"
    if entry is not None:
        group = entry.group
    return BlockPicture(state, block.ref_count, group, entry.key[:KEY_BYTES] if entry is not None else b"")
