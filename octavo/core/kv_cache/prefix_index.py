"""PrefixIndex: from the hash of a block's contents to a block that holds them. Knows nothing of references."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.core.kv_cache.block import Block


class PrefixIndex:
    """One block per hash. Of two blocks with equal contents the first one is found, the other stays nameless.

    ``on_removed`` hears of each block that has just lost its name, except by ``clear``.
    """

    __slots__ = ("_blocks", "_on_removed")

    def __init__(self, on_removed: Callable[[Block], None] = lambda block: None) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._on_removed = on_removed

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_hash: bytes) -> Block | None:
        """The block with these contents, if there is one."""
        return self._blocks.get(block_hash)

    def longest(self, hashes: Iterable[bytes]) -> list[Block]:
        """Blocks of the longest prefix of ``hashes`` that is here without a gap."""
        found = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, block_hash: bytes, block: Block) -> bool:
        """Name ``block``, which has no name; False if another block already has this one."""
        named = self._blocks.setdefault(block_hash, block) is block
        if named:
            block.block_hash = block_hash
        return named

    def remove(self, block: Block) -> None:
        """Forget the name of ``block``, if it has one."""
        if block.block_hash is not None:
            del self._blocks[block.block_hash]
            block.block_hash = None
            self._on_removed(block)

    def clear(self) -> None:
        """Forget all names."""
        for block in self._blocks.values():
            block.block_hash = None
        self._blocks.clear()
