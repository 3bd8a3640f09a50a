"""HashIndex: from the hash of a block's contents to a block that holds them. Finds full blocks only."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.names import Names, block_key
from octavo.core.kv_cache.prefix_index import Match
from octavo.core.request import Request


class HashIndex:
    """A PrefixIndex: the names alone. Of blocks with equal contents only the first one is cached."""

    __slots__ = ("_block_size", "_num_groups", "names")

    def __init__(self, names: Names, block_size: int, num_groups: int = 1) -> None:
        self.names, self._block_size, self._num_groups = names, block_size, num_groups

    def __len__(self) -> int:
        return len(self.names.blocks)

    def __contains__(self, block: Block) -> bool:
        return block.entry is not None and self.names.blocks.get(block.entry.key) is block

    def match(self, request: Request, num_tokens: int) -> Match:
        """See ``PrefixIndex.match``. The request remembers all its hashes."""
        found: list[Block] = []
        num_full, blocks = num_tokens // self._block_size, self.names.blocks
        for row_hash in request.hashes(self._block_size)[:num_full] if num_full else ():
            block = blocks.get(row_hash)
            if block is None:
                break
            found.append(block)
        return Match(found)

    def insert(self, request: Request, blocks: Sequence[Block], num_tokens: int, *, first: int = 0) -> None:
        """See ``PrefixIndex.insert``."""
        hashes, known, num_groups = request.hashes(self._block_size), self.names.blocks, self._num_groups
        for row in range(first, num_tokens // self._block_size):
            for group in range(num_groups):
                block = blocks[row * num_groups + group]
                key = block_key(hashes[row], group)
                if block.entry is None and block.block_id and key not in known:
                    self.names.add(key, block, request, row)

    def remove(self, block: Block) -> None:
        """See ``PrefixIndex.remove``: this block alone."""
        if block.entry is not None:
            self.names.drop(block.entry)

    def clear(self) -> None:
        """See ``PrefixIndex.clear``."""
        self.names.clear()
