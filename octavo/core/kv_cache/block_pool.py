"""BlockPool: every KV block, its reference count and the free list. Knows nothing of requests or tokens.

A block is in exactly one state: null (block 0, never handed out), referenced (ref_count > 0), or free; a free block
in the prefix index is "cached": it can be taken back until its memory is needed.

    free list   head [not cached ...][cached, least recently used ... most recently used] tail
                 ^ allocate() takes here                                free() puts here ^

The manager frees a table's tail first, so what continues a prefix is always taken before the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.core.kv_cache.block import Block, FreeList
from octavo.core.kv_cache.prefix_index import PrefixIndex
from octavo.exceptions import InvariantError


class BlockPool:
    """``num_blocks`` blocks, the null block included."""

    __slots__ = ("_free", "_on_evict", "blocks", "index")

    def __init__(
        self, num_blocks: int, index: PrefixIndex, on_evict: Callable[[bytes, int], None] = lambda key, block_id: None
    ) -> None:
        """``on_evict`` hears the key and the id of each block whose contents are given up."""
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.index = index
        self._on_evict = on_evict
        self._free = FreeList()
        for block in self.blocks[1:]:
            self._free.push_tail(block)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Referenced blocks / usable blocks, 0..1."""
        return (self.num_usable - self.num_free) / self.num_usable

    def allocate(self, count: int) -> list[Block]:
        """``count`` blocks with one reference each; the index forgets them. ``count`` must be <= num_free."""
        if count > len(self._free):
            raise InvariantError(f"{count} blocks asked of a pool with {len(self._free)} free ones")
        taken = [self._free.pop_head() for _ in range(count)]
        for block in taken:
            entry = block.entry
            if entry is not None:
                if entry.key:
                    self._on_evict(entry.key, block.block_id)
                self.index.remove(block)
            block.ref_count = 1
        return taken

    def acquire(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each of ``blocks``, found in the prefix index or shared with another table."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop a reference of each block, in the order in which they may be reused: give a table's tail first."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.ref_count < 0:
                raise InvariantError(f"block {block.block_id} is freed more often than it was taken")
            if block.entry is not None:
                self._free.push_tail(block)
            else:
                self._free.push_head(block)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Those of ``blocks`` that are free become the last ones to be reused, in this order."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
                self._free.push_tail(block)

    def discard(self, block: Block) -> None:
        """``block`` holds nothing that is wanted: if it is free, it is the next to be reused."""
        if block.ref_count == 0:
            self._free.remove(block)
            self._free.push_head(block)

    def check_invariants(self, references: dict[int, int]) -> None:
        """``references``: how many block tables hold each block id. Raises InvariantError."""
        free = [block.block_id for block in self._free]
        if len(free) != len(set(free)) or len(free) != len(self._free):
            raise InvariantError(f"the free list of {len(self._free)} blocks is broken: {free}")
        free_ids = set(free)
        num_cached = num_keys = 0
        for block in self.blocks:
            expected = references.get(block.block_id, 0)
            if block.ref_count != expected:
                raise InvariantError(f"{block} is in {expected} block tables")
            if (block.block_id in free_ids) != (expected == 0 and block.block_id != 0):
                raise InvariantError(f"{block} is in the free list and in use, or in neither")
            if block.is_cached:
                num_cached += 1
                num_keys += block.key is not None
                if block not in self.index or (block.key and self.index.names.blocks.get(block.key) is not block):
                    raise InvariantError(f"{block} is not where the prefix index has it")
        if 0 in references or self.blocks[0].is_cached:
            raise InvariantError("the null block is in use")
        found = len(self.index), len(self.index.names.blocks)
        if found != (num_cached, num_keys):
            raise InvariantError(f"{found} blocks, keys in the prefix index, {num_cached, num_keys} that say so")
