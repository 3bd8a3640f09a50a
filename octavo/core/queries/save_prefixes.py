"""SavePrefixes: write cached blocks to the disk tier. Changes the tiers alone."""

from __future__ import annotations

from octavo.core.kv_cache.prefix_tree import PrefixTree
from octavo.core.queries import CoreState
from octavo.exceptions import ValidationError
from octavo.messages import BlocksSaved, NotFound, SavePrefixes


def answer(query: SavePrefixes, core: CoreState) -> BlocksSaved | NotFound:
    """How many blocks the disk tier has now. Raises ValidationError if there is none.

    Blocks that a step in flight still fills are left out.
    """
    chain, is_filling = core.kv.tiers.chain, core.kv.tiers.is_filling
    if not chain.has_tier("disk"):
        raise ValidationError(
            "nothing here keeps KV blocks beyond the life of the process; start the server with --kv-cache-dir",
            parameter="prefix_id",
        )
    entries = core.kv.index.names.entries()
    if query.prefix is not None:
        entries = [entry for row in PrefixTree(entries).path(query.prefix) for entry in row.entries]
        if not entries:
            return NotFound()
    saved = [entry for entry in entries if not is_filling(entry.block.block_id)]
    for entry in saved:
        chain.filled(entry.key, entry.block.block_id)
    return BlocksSaved(len(saved))
