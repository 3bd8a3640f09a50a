"""Block: the bookkeeping of one KV block. Knows nothing of the pool that links it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.kv_cache.names import CacheEntry


class Block:
    """``ref_count`` block tables contain it; with 0 it is in the free list, linked by ``prev`` and ``next``.

    ``entry`` is set, by the prefix index alone, while that leads here.
    """

    __slots__ = ("block_id", "entry", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.entry: CacheEntry | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_cached(self) -> bool:
        """A prefix index leads here."""
        return self.entry is not None

    @property
    def key(self) -> bytes | None:
        """The key that leads here, if the block is cached and full."""
        return self.entry.key or None if self.entry is not None else None

    def __repr__(self) -> str:
        key = self.key.hex()[:8] if self.key else None
        return f"Block({self.block_id}, refs={self.ref_count}, key={key})"


class FreeList:
    """Doubly linked list of free blocks, least recently used first; every operation is O(1)."""

    __slots__ = ("_end", "_length")

    def __init__(self) -> None:
        self._end = Block(-1)  # sentinel: its next is the head, its prev the tail
        self._end.prev = self._end.next = self._end
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._end.next
        while block is not self._end:
            assert block is not None
            yield block
            block = block.next

    def push_tail(self, block: Block) -> None:
        """Make ``block`` the last one to be taken."""
        self._link(block, self._end)

    def push_head(self, block: Block) -> None:
        """Make ``block`` the next one to be taken."""
        assert self._end.next is not None
        self._link(block, self._end.next)

    def pop_head(self) -> Block:
        """Take the least recently used block. The list must not be empty."""
        block = self._end.next
        assert block is not None
        assert block is not self._end
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take ``block`` out of the middle."""
        assert block.prev is not None
        assert block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._length -= 1

    def _link(self, block: Block, after: Block) -> None:
        assert after.prev is not None
        block.prev, block.next = after.prev, after
        after.prev.next = block
        after.prev = block
        self._length += 1
