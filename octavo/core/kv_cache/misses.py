"""Misses: why no more of a prompt was found in the cache. An observer of the names."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.names import CacheEntry, Names
from octavo.core.request import Request
from octavo.messages import CacheMiss


class Misses:
    """Compares a prompt with what follows its cached prefix. Before the first question it keeps nothing."""

    def __init__(self, names: Names, block_size: int) -> None:
        self._names, self._block_size = names, block_size
        self._followers: dict[bytes | None, set[CacheEntry]] | None = None  # by the hash of the row before

    def named(self, entry: CacheEntry) -> None:
        """See ``CacheObserver``."""
        if self._followers is not None:
            self._followers.setdefault(entry.parent, set()).add(entry)

    def unnamed(self, entry: CacheEntry) -> None:
        """See ``CacheObserver``."""
        if self._followers is not None:
            siblings = self._followers[entry.parent]
            siblings.remove(entry)
            if not siblings:
                del self._followers[entry.parent]

    def cleared(self) -> None:
        """See ``CacheObserver``."""
        self._followers = None

    def explain(self, request: Request, num_found: int | None) -> CacheMiss:
        """Why no more than ``num_found`` tokens of ``request`` were found; None: they were not looked for.

        Compares only with what the same tenant computed under the same salt: a client must not learn others' prompts.
        """
        if num_found is None:
            return CacheMiss("off", 0, 0)
        size, hashes = self._block_size, request.hashes(self._block_size)
        row = num_found // size
        if row == request.num_reusable_tokens // size:
            return CacheMiss("complete", num_found, num_found)
        if self._followers is None:
            self._followers = {}
            for entry in self._names.entries():
                self.named(entry)
        others = self._followers.get(hashes[row - 1] if row else None, ())
        if any(entry.row_hash == hashes[row] for entry in others):  # but not all blocks that the next token sees
            return CacheMiss("ends", num_found, num_found)
        rest = request.token_ids[row * size : (row + 1) * size]
        own = [_num_common(entry.token_ids, rest) for entry in others if _may_know(request, entry)]
        position = row * size + max(own, default=0)
        if position == 0:
            return CacheMiss("new", num_found, position)
        return CacheMiss("differs" if own else "ends", num_found, position)


def _may_know(request: Request, entry: CacheEntry) -> bool:
    source = request.source
    return entry.tenant == source.scheduling.tenant.name and (
        entry.parent is not None or entry.salt == source.cache.salt
    )


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
