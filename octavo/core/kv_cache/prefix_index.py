"""PrefixIndex: from the tokens of a request to blocks that hold their KV already. Knows nothing of references.

``hash_index.py`` finds full blocks, ``radix_index.py`` single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from octavo.config.choices import PREFIX_INDEXES
from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.names import Names
from octavo.core.request import Request
from octavo.utils.registry import resolve


class Match(NamedTuple):
    """A prefix: ``blocks`` are full of its first tokens, and the first ``num_shared`` tokens of ``source`` follow.

    ``source`` goes on differently, or ends there: to use it, copy it. Valid until the next change of the index.
    """

    blocks: Sequence[Block] = ()
    source: Block | None = None
    num_shared: int = 0


class PrefixIndex(Protocol):
    """Which blocks are cached. A block is cached from ``insert`` until ``remove``, and has ``Block.entry`` so long.

    Only an index gives and takes entries. Full blocks can be found by their keys too, in ``names``, whose observers
    hear of each that comes or goes. None of the methods raises for a block or a request that it does not know.
    """

    names: Names

    def __len__(self) -> int:
        """Number of cached blocks, partly filled ones included."""
        ...

    def __contains__(self, block: Block) -> bool:
        """Whether a search for the contents of ``block`` ends at this very block."""
        ...

    def match(self, request: Request, num_tokens: int) -> Match:
        """Find the longest cached prefix of the first ``num_tokens`` of the request's known tokens, KV group 0.

        Changes nothing but the hashes that the request remembers.
        """
        ...

    def insert(self, request: Request, blocks: Sequence[Block], num_tokens: int, *, first: int = 0) -> None:
        """Cache the blocks of the first ``num_tokens`` tokens of the request; rows before ``first`` are known to be.

        ``blocks`` is the request's table: row by row, one block of each KV group. The null block is left out. Where
        another block has the same contents, that one stays and the request's is not cached; a partly filled one that
        holds less goes.
        """
        ...

    def remove(self, block: Block) -> None:
        """Let ``block``, if it is cached, not be found any more; an index may drop those that continue it too."""
        ...

    def clear(self) -> None:
        """Remove all blocks."""
        ...


def make_index(kind: str, block_size: int, num_groups: int, clock: Callable[[], float]) -> PrefixIndex:
    """An empty index. ``kind``: one of ``PREFIX_INDEXES``; ``radix`` only for one KV group of full attention."""
    index: PrefixIndex = resolve(PREFIX_INDEXES[kind])(Names(block_size, clock), block_size, num_groups)
    return index
