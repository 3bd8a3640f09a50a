"""PrefixIndex: from the tokens of a request to blocks that hold their KV already. Knows nothing of references.

``hash_index.py`` finds full blocks, ``radix_index.py`` single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from octavo.core.kv_cache.block import Block
from octavo.core.request import Request
from octavo.utils.registry import resolve

INDEXES = {
    "hash": "octavo.core.kv_cache.hash_index:HashIndex",
    "radix": "octavo.core.kv_cache.radix_index:RadixIndex",
}


OnNamed = Callable[[bytes, Block, Request, int], None]
OnRemoved = Callable[[Block], None]


def nobody(*told: object) -> None:
    """Who listens to an index by default."""


class Match(NamedTuple):
    """A prefix: ``blocks`` are full of its first tokens, and the first ``num_shared`` tokens of ``source`` follow.

    ``source`` goes on differently, or ends there: to use it, copy it.
    """

    blocks: Sequence[Block] = ()
    source: Block | None = None
    num_shared: int = 0


class PrefixIndex(Protocol):
    """A block is in it ("cached") from :meth:`insert` until :meth:`remove`, and then has ``Block.is_cached``.

    Made with a block size and two callbacks, which hear of full blocks: ``on_named`` of each that has just got a name
    (name, block, and of whose tokens which row it is), ``on_removed`` of each that has just lost it, except by
    :meth:`clear`.
    """

    def __len__(self) -> int:
        """Blocks in it."""
        ...

    def __contains__(self, block: Block) -> bool:
        """Is it this very block that its contents lead to?"""
        ...

    def match(self, request: Request, num_tokens: int) -> Match:
        """The longest prefix of the first ``num_tokens`` of the request's known tokens."""
        ...

    def insert(self, request: Request, blocks: Sequence[Block], num_tokens: int, *, first: int = 0) -> None:
        """``blocks`` hold the first ``num_tokens`` tokens of the request; those before ``first`` were inserted before.

        Where a block with equal contents is there, it stays; a partly filled one that holds less goes.
        """
        ...

    def remove(self, block: Block) -> None:
        """``block``, if it is in the index, is not to be found any more; perhaps nor are those that continue it."""
        ...

    def clear(self) -> None:
        """Remove all blocks."""
        ...


def make_index(kind: str, block_size: int, on_named: OnNamed, on_removed: OnRemoved) -> PrefixIndex:
    """``kind``: one of ``INDEXES``."""
    index: PrefixIndex = resolve(INDEXES[kind])(block_size, on_named, on_removed)
    return index
