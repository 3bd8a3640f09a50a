"""PrefixTree: which prefixes are cached, drawn from the names when an administrator asks. Takes time by the block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.names import CacheEntry


@dataclass(frozen=True, slots=True)
class Row:
    """The cached blocks with the same tokens: at most one of each KV group."""

    entries: Sequence[CacheEntry]

    @property
    def row_hash(self) -> bytes:
        return self.entries[0].row_hash

    @property
    def parent(self) -> bytes | None:
        """Hash of the row before, which need not be cached; None for the first row of a sequence."""
        return self.entries[0].parent

    @property
    def num_tokens(self) -> int:
        """Of the sequence up to the row's end."""
        return self.entries[0].num_tokens

    @property
    def token_ids(self) -> Sequence[int]:
        return self.entries[0].token_ids

    @property
    def salt(self) -> str | None:
        return self.entries[0].salt


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """A prefix up to the row ``last``. Hits and last use are those of all cached sequences that begin with it."""

    last: Row
    hits: int
    last_used: float


class PrefixTree:
    """The rows of ``entries`` at the time of asking: not to be kept."""

    def __init__(self, entries: Iterable[CacheEntry]) -> None:
        found: dict[bytes, list[CacheEntry]] = {}
        for entry in entries:
            found.setdefault(entry.row_hash, []).append(entry)
        self.rows = {row_hash: Row(same) for row_hash, same in found.items()}
        self._children: dict[bytes | None, list[bytes]] = {}
        for row in self.rows.values():
            self._children.setdefault(row.parent, []).append(row.row_hash)

    def path(self, row_hash: bytes) -> list[Row]:
        """All rows up to this one; empty unless each is cached."""
        path: list[Row] = []
        current: bytes | None = row_hash
        while current is not None:
            row = self.rows.get(current)
            if row is None:
                return []
            path.append(row)
            current = row.parent
        return path[::-1]

    def branch(self, row_hash: bytes) -> list[Row]:
        """This row, all that follow it, and those before it that nothing else follows; empty if it is not cached."""
        if row_hash not in self.rows:
            return []
        top = self.rows[row_hash]
        while top.parent in self.rows and len(self._children[top.parent]) == 1:
            top = self.rows[top.parent]
        found, waiting = [], [top.row_hash]
        while waiting:
            row = self.rows[waiting.pop()]
            found.append(row)
            waiting += self._children.get(row.row_hash, ())
        return found

    def prefixes(self, marked: Collection[bytes]) -> list[PrefixUse]:
        """Prefixes that nothing follows, after which sequences part, or that are ``marked``; last used first."""
        found: list[PrefixUse] = []
        totals: dict[bytes, tuple[int, float]] = {}
        waiting = [(root, False) for root in self._children.get(None, ())]
        while waiting:
            row_hash, done = waiting.pop()
            row, children = self.rows[row_hash], self._children.get(row_hash, ())
            if not done:  # first those that follow it
                waiting += [(row_hash, True), *((child, False) for child in children)]
                continue
            hits = max(entry.hits for entry in row.entries) + sum(totals[child][0] for child in children)
            times = [entry.last_used for entry in row.entries]
            last_used = max([*times, *(totals[child][1] for child in children)])
            totals[row_hash] = hits, last_used
            if len(children) != 1 or row_hash in marked:
                found.append(PrefixUse(row, hits, last_used))
        return sorted(found, key=lambda prefix: (-prefix.last_used, -prefix.hits, prefix.last.row_hash))


def blocks_of(rows: Iterable[Row]) -> list[Block]:
    """The blocks of ``rows``, in their order."""
    return [entry.block for row in rows for entry in row.entries]
