"""PrefixBook: what the named blocks are: their tokens, whose they are, and when they were of use.

The index finds blocks; the book can tell about them: which prefixes there are, and where a prompt that missed departs
from them. It hears of every name that is given or taken. The names of a row of blocks begin with the row's hash (with
several KV groups, the group follows). Knows nothing of reference counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from octavo.core.kv_cache.block import Block
from octavo.core.request import Request
from octavo.messages import CacheMiss

HASH_BYTES = 32


@dataclass(slots=True, eq=False)
class Row:
    """The last ``token_ids`` of ``num_tokens`` tokens, and the blocks that hold them, by name: one of each KV group."""

    row_hash: bytes
    parent: bytes | None
    num_tokens: int
    token_ids: Sequence[int]
    salt: str | None
    tenant: str  # whose request computed it
    last_used: float
    hits: int = 0  # requests whose cached prefix ended here
    blocks: dict[bytes, Block] = field(default_factory=dict)


@dataclass(slots=True)
class CachedPrefix:
    """All rows up to ``last``. Hits and last use are those of all that begin with it."""

    last: Row
    hits: int
    last_used: float


class PrefixBook:
    """``clock`` gives seconds."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size, self._clock = block_size, clock
        self._rows: dict[bytes, Row] = {}
        self._names: dict[int, bytes] = {}  # by block id
        self._children: dict[bytes | None, set[bytes]] = {}

    def named(self, name: bytes, block: Block, request: Request, index: int) -> Row:
        """``block`` got ``name`` for the ``index``-th row of ``request``."""
        hashes = request.block_hashes
        row = self._rows.get(hashes[index])
        if row is None:
            parent, end = hashes[index - 1] if index else None, (index + 1) * self._block_size
            row = self._rows[hashes[index]] = Row(
                hashes[index],
                parent,
                end,
                tuple(request.token_ids[end - self._block_size : end]),
                request.source.cache_salt,
                request.source.tenant.name,
                self._clock(),
            )
            self._children.setdefault(parent, set()).add(row.row_hash)
        row.blocks[name] = block
        self._names[block.block_id] = name
        return row

    def unnamed(self, block: Block) -> bytes:
        """``block`` has lost its name, which is returned."""
        name = self._names.pop(block.block_id)
        row = self._rows[name[:HASH_BYTES]]
        del row.blocks[name]
        if not row.blocks:
            del self._rows[row.row_hash]
            siblings = self._children[row.parent]
            siblings.remove(row.row_hash)
            if not siblings:
                del self._children[row.parent]
        return name

    def clear(self) -> None:
        """All names are taken."""
        self._rows.clear()
        self._names.clear()
        self._children.clear()

    def used(self, row_hash: bytes) -> None:
        """A request begins with the cached prefix that ends here."""
        row = self._rows.get(row_hash)
        if row is not None:
            row.hits += 1
            row.last_used = self._clock()

    # ---- what is there

    def block(self, name: bytes) -> Block | None:
        """The block with this name."""
        row = self._rows.get(name[:HASH_BYTES])
        return row.blocks.get(name) if row is not None else None

    def path(self, row_hash: bytes) -> list[Row]:
        """All rows up to this one; none unless each is there."""
        path: list[Row] = []
        current: bytes | None = row_hash
        while current is not None:
            row = self._rows.get(current)
            if row is None:
                return []
            path.append(row)
            current = row.parent
        return path[::-1]

    def branch(self, row_hash: bytes) -> list[Row]:
        """This row, all that follow it, and those before it that nothing else follows; none if it is not there."""
        if row_hash not in self._rows:
            return []
        top = self._rows[row_hash]
        while top.parent in self._rows and len(self._children[top.parent]) == 1:
            top = self._rows[top.parent]
        found, waiting = [], [top.row_hash]
        while waiting:
            row = self._rows[waiting.pop()]
            found.append(row)
            waiting += self._children.get(row.row_hash, ())
        return found

    def rows(self) -> list[Row]:
        """All rows."""
        return list(self._rows.values())

    def prefixes(self, marked: Collection[bytes]) -> list[CachedPrefix]:
        """Where nothing goes on, or sequences part, and the ``marked`` ones; most recently used first."""
        found: list[CachedPrefix] = []
        totals: dict[bytes, tuple[int, float]] = {}
        waiting = [(root, False) for root in self._children.get(None, ())]
        while waiting:
            row_hash, done = waiting.pop()
            row, children = self._rows[row_hash], self._children.get(row_hash, ())
            if not done:  # first those that follow it
                waiting += [(row_hash, True), *((child, False) for child in children)]
                continue
            hits = row.hits + sum(totals[child][0] for child in children)
            last_used = max([row.last_used, *(totals[child][1] for child in children)])
            totals[row_hash] = hits, last_used
            if len(children) != 1 or row_hash in marked:
                found.append(CachedPrefix(row, hits, last_used))
        return sorted(found, key=lambda prefix: (-prefix.last_used, -prefix.hits, prefix.last.row_hash))

    # ---- why a prompt missed

    def explain(self, request: Request, num_found: int) -> CacheMiss:
        """Where the tokens of ``request``, of which ``num_found`` were found, depart from what is cached.

        Looks only at what the same tenant has computed under the same salt.
        """
        size, hashes = self._block_size, request.hashes(self._block_size)
        index = num_found // size
        if index == request.num_reusable_tokens // size:
            return CacheMiss("complete", num_found, num_found)
        if hashes[index] in self._rows:  # some of its blocks are, not all that the next token sees
            return CacheMiss("ends", num_found, num_found)
        parent, rest = hashes[index - 1] if index else None, request.token_ids[index * size : (index + 1) * size]
        others = [self._rows[child] for child in self._children.get(parent, ())]
        own = [_common(row.token_ids, rest) for row in others if self._may_know(row, request)]
        position = index * size + max(own, default=0)
        if position == 0:
            return CacheMiss("new", num_found, position)
        return CacheMiss("differs" if own else "ends", num_found, position)

    @staticmethod
    def _may_know(row: Row, request: Request) -> bool:
        source = request.source
        return row.tenant == source.tenant.name and (row.parent is not None or row.salt == source.cache_salt)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
