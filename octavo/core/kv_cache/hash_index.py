"""HashIndex: from the hash of a block's contents to a block that holds them. Finds full blocks only."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.prefix_index import Match, OnNamed, OnRemoved, nobody
from octavo.core.request import Request


class HashIndex:
    """A PrefixIndex: a dictionary. Of blocks with equal contents the first one is found, the others stay nameless."""

    __slots__ = ("_block_size", "_blocks", "_on_named", "_on_removed")

    def __init__(self, block_size: int, on_named: OnNamed = nobody, on_removed: OnRemoved = nobody) -> None:
        self._block_size, self._on_named, self._on_removed = block_size, on_named, on_removed
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return block.block_hash is not None and self._blocks.get(block.block_hash) is block

    def match(self, request: Request, num_tokens: int) -> Match:
        found: list[Block] = []
        num_full = num_tokens // self._block_size
        for block_hash in request.hashes(self._block_size)[:num_full] if num_full else ():
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return Match(found)

    def insert(self, request: Request, blocks: Sequence[Block], num_tokens: int, *, first: int = 0) -> None:
        hashes = request.hashes(self._block_size)
        for row in range(first, num_tokens // self._block_size):
            self.name(hashes[row], blocks[row], request, row)

    def get(self, name: bytes) -> Block | None:
        """The block with this name, if there is one."""
        return self._blocks.get(name)

    def name(self, name: bytes, block: Block, request: Request, row: int) -> None:
        """Name ``block``, a row of ``request``, unless it has a name or another block has this one."""
        if block.block_hash is None and self._blocks.setdefault(name, block) is block:
            block.block_hash = name
            self._on_named(name, block, request, row)

    def remove(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._blocks[block.block_hash]
            block.block_hash = None
            self._on_removed(block)

    def clear(self) -> None:
        for block in self._blocks.values():
            block.block_hash = None
        self._blocks.clear()
