"""Names: which block each key leads to, what is known of it, and who hears of changes. Finds no prefixes.

    key     = hash of the row (contents of the block and of all before it), then the KV group if it is not group 0
    row     = the blocks of one hash, one of each KV group
    entry   = what is known of the one block that a key leads to

The names are the only place where keys are kept. A block points back at its entry, so that no second table is needed
when it is evicted. Everything else that follows the cache (pins, events, explanations) is a :class:`CacheObserver`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.core.kv_cache.block import Block
from octavo.core.request import Request

if TYPE_CHECKING:
    from octavo.core.kv_cache.radix_index import RadixNode

HASH_BYTES = 32


def block_key(row_hash: bytes, group: int) -> bytes:
    """The key of the block that holds a row's tokens for KV group ``group``."""
    return row_hash + group.to_bytes(4) if group else row_hash


class CacheEntry:
    """One cached block. A partly filled one, which only a RadixIndex has, has no ``key``; observers do not hear of it.

    ``token_ids``: those of the block, the last ones of ``num_tokens`` in all. ``parent``: hash of the row before it.
    ``salt`` and ``tenant``: of the request that computed it. ``hits``: requests whose cached prefix ended here.
    ``node``: where a RadixIndex has the block.
    """

    __slots__ = (
        "block",
        "hits",
        "key",
        "last_used",
        "node",
        "num_tokens",
        "parent",
        "row_hash",
        "salt",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        key: bytes,
        block: Block,
        row_hash: bytes = b"",
        parent: bytes | None = None,
        num_tokens: int = 0,
        token_ids: Sequence[int] = (),
        salt: str | None = None,
        tenant: str = "",
        last_used: float = 0.0,
    ) -> None:
        self.key = key
        self.block = block
        self.row_hash = row_hash
        self.parent = parent
        self.num_tokens = num_tokens
        self.token_ids = token_ids
        self.salt = salt
        self.tenant = tenant
        self.last_used = last_used
        self.hits = 0
        self.node: RadixNode | None = None

    @property
    def group(self) -> int:
        """The KV group whose K and V the block holds."""
        return int.from_bytes(self.key[HASH_BYTES:])


class CacheObserver(Protocol):
    """Hears of every change of the names, in the order of ``Names.observers``, after the change. Must change none."""

    def named(self, entry: CacheEntry) -> None:
        """``entry.key`` leads to ``entry.block`` from now on."""
        ...

    def unnamed(self, entry: CacheEntry) -> None:
        """``entry.key`` leads to no block any more."""
        ...

    def cleared(self) -> None:
        """No key leads to a block any more. ``unnamed`` is not called for each."""
        ...


class Names:
    """``blocks``: by key, the one block it leads to. Only an index changes it. ``clock`` gives seconds."""

    __slots__ = ("_block_size", "_clock", "blocks", "observers")

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size, self._clock = block_size, clock
        self.blocks: dict[bytes, Block] = {}
        self.observers: Sequence[CacheObserver] = ()

    def entries(self) -> Collection[CacheEntry]:
        """All that there are."""
        return [block.entry for block in self.blocks.values() if block.entry is not None]

    def add(self, key: bytes, block: Block, request: Request, row: int) -> CacheEntry:
        """Let ``key`` lead to ``block``, which holds a row of ``request``. Neither may have been named."""
        hashes, start, end = request.block_hashes, row * self._block_size, (row + 1) * self._block_size
        source = request.source
        entry = CacheEntry(
            key,
            block,
            hashes[row],
            hashes[row - 1] if row else None,
            end,
            request.token_ids[start:end],
            source.cache.salt,
            source.scheduling.tenant.name,
            self._clock(),
        )
        self.blocks[key] = block
        block.entry = entry
        for observer in self.observers:
            observer.named(entry)
        return entry

    def drop(self, entry: CacheEntry) -> None:
        """Let ``entry.key``, which leads to a block, lead to none."""
        del self.blocks[entry.key]
        entry.block.entry = None
        for observer in self.observers:
            observer.unnamed(entry)

    def used(self, block: Block) -> None:
        """A request begins with the cached prefix that ends with ``block``, which has a name."""
        entry = block.entry
        if entry is not None:
            entry.hits += 1
            entry.last_used = self._clock()

    def clear(self) -> None:
        """Let no key lead to a block."""
        for block in self.blocks.values():
            block.entry = None
        self.blocks.clear()
        for observer in self.observers:
            observer.cleared()
