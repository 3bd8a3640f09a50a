"""Where the first tokens of a waiting request are: in cached blocks, in tiers, or in what it left behind. Only looks.

With one group of full attention a prefix is a run of blocks, as long as the index and then the tiers have the next one.
With windows a prefix has gaps: it is there if each group has the rows that the next token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.groups import GroupStrategy
from octavo.core.kv_cache.names import block_key
from octavo.core.kv_cache.prefix_index import PrefixIndex
from octavo.core.kv_cache.swaps import block_keys
from octavo.core.kv_cache.tier_link import TierLink
from octavo.core.request import Request

Place = Block | bytes | None
"""Where the contents of a block are: in the pool, under a key in a tier, or nowhere."""


class Prefix(NamedTuple):
    """Where the first ``num_tokens`` tokens of a request are.

    ``blocks`` begin its table: null where the next token sees nothing and, in order, for each of ``keys``, which are to
    be loaded from tiers. Or the last tokens are the first ones in ``source``. With none of these, they are in the
    request's own table already.
    """

    blocks: Sequence[Block] = ()
    num_tokens: int = 0
    keys: Sequence[bytes] = ()
    num_external: int = 0  # tokens, of those, that are in tiers
    source: Block | None = None  # to be copied

    @property
    def num_local(self) -> int:
        """Tokens that need no loading."""
        return self.num_tokens - self.num_external


class PrefixFinder(Protocol):
    """Looks in the index, the tiers and the swaps, and changes nothing but the hashes that a request remembers."""

    def find(self, request: Request, num_tokens: int) -> Prefix:
        """The longest prefix of the first ``num_tokens`` known tokens, or a longer one that the request has swapped."""
        ...


class RunFinder:
    """A PrefixFinder for one group that keeps all rows. ``null``: the null block."""

    __slots__ = ("_block_size", "_index", "_null", "_tiers")

    def __init__(self, index: PrefixIndex, tiers: TierLink, block_size: int, null: Block) -> None:
        self._index, self._tiers, self._block_size, self._null = index, tiers, block_size, null

    def find(self, request: Request, num_tokens: int) -> Prefix:
        """See ``PrefixFinder.find``."""
        blocks, source, num_shared = self._index.match(request, num_tokens)
        found, local = len(blocks), len(blocks) * self._block_size
        own, end = self._tiers.swaps.find(request, found)
        keys = self._tiers.find(request, found, num_tokens // self._block_size)
        external = len(keys) * self._block_size
        if source is not None and not keys and num_shared > end - local and not self._tiers.is_filling(source.block_id):
            return Prefix(blocks, local + num_shared, source=source)
        if end > local + external:
            keys, external = own, end - local
        return Prefix([*blocks, *[self._null] * len(keys)] if keys else blocks, local + external, keys, external)


class WindowFinder:
    """A PrefixFinder for any ``groups``: a prefix is what the next token sees of each. Finds full blocks by key."""

    __slots__ = ("_block_size", "_groups", "_index", "_null", "_tiers")

    def __init__(
        self, groups: Sequence[GroupStrategy], index: PrefixIndex, tiers: TierLink, block_size: int, null: Block
    ) -> None:
        self._groups, self._index, self._tiers, self._block_size = groups, index, tiers, block_size
        self._null = null

    def find(self, request: Request, num_tokens: int) -> Prefix:
        """See ``PrefixFinder.find``."""
        longest, groups, size = num_tokens // self._block_size, self._groups, self._block_size
        hashes, can_load = request.hashes(size)[:longest], self._tiers.chain.finder()
        rows, runs, best = [], [0] * len(groups), 0  # runs: rows up to here that each group has without a gap
        for row_hash in hashes:
            rows.append(self._places(row_hash, can_load))
            runs = [0 if place is None else run + 1 for place, run in zip(rows[-1], runs)]
            if any(run < len(rows) and not group.gives_back for run, group in zip(runs, groups)):
                break
            seen = len(rows) * size
            if all(run >= len(rows) - group.first_row(seen) for run, group in zip(runs, groups)):
                best = len(rows)
        swap = self._tiers.swaps.of(request)
        if swap is not None and swap.num_tokens > best * size:
            keys = block_keys(request, swap.num_tokens, size)
            own = [self._places(key, can_load, in_pool=i < longest) for i, key in enumerate(keys)]
            if self._is_whole(own, swap.num_tokens):
                return self._prefix(own, swap.num_tokens)
        return self._prefix(rows[:best], best * size)

    def _places(self, row_hash: bytes, can_load: Callable[[bytes], bool], *, in_pool: bool = True) -> list[Place]:
        """Where each group's block of a row is."""
        keys, cached = [block_key(row_hash, group) for group in range(len(self._groups))], self._index.names.blocks
        blocks = [cached.get(key) if in_pool else None for key in keys]
        return [block or (key if can_load(key) else None) for block, key in zip(blocks, keys)]

    def _is_whole(self, rows: Sequence[Sequence[Place]], num_tokens: int) -> bool:
        firsts = [group.first_row(num_tokens) for group in self._groups]
        return all(row[group] is not None for group, first in enumerate(firsts) for row in rows[first:])

    def _prefix(self, rows: Sequence[Sequence[Place]], num_tokens: int) -> Prefix:
        """``num_tokens`` tokens that are in these places."""
        firsts = [group.first_row(num_tokens) for group in self._groups]
        seen = [place if i >= firsts[group] else None for i, row in enumerate(rows) for group, place in enumerate(row)]
        blocks = [place if isinstance(place, Block) else self._null for place in seen]
        keys = [place for place in seen if isinstance(place, bytes)]
        first_key = next((i for i, place in enumerate(seen) if isinstance(place, bytes)), len(seen))
        local = num_tokens if not keys else first_key // len(self._groups) * self._block_size
        return Prefix(blocks, num_tokens, keys, num_tokens - local)
