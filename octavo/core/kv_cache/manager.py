"""KVCacheManager: block tables of the running requests. The scheduler's only door to KV memory.

Knows requests' lengths and hashes; decides nothing about who runs.

    block table     [ b7 ][ b3 ][ b9 ][ b4 ]        block_size tokens each
    tokens          |<- num_computed_tokens ->| n |
    num_named         2: b7, b3 are full of known tokens and can be found by others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.prefix_index import PrefixIndex
from octavo.core.request import Request
from octavo.exceptions import InvariantError


class _Table:
    __slots__ = ("blocks", "num_named", "private")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_named = 0  # leading blocks offered to the prefix index
        self.private = False  # never offer more of them


class KVCacheManager:
    """Hands out blocks of ``block_size`` tokens; finds and names shared prefixes unless told not to."""

    __slots__ = ("_tables", "block_size", "enable_prefix_caching", "index", "pool")

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index)
        self._tables: dict[str, _Table] = {}

    @property
    def usage(self) -> float:
        """Referenced blocks / usable blocks, 0..1."""
        return (self.pool.num_usable - self.pool.num_free) / self.pool.num_usable

    def find_prefix(self, request: Request) -> list[Block]:
        """Blocks that already hold the request's first tokens, none of those whose logits are needed."""
        longest = request.num_reusable_tokens // self.block_size
        if not self.enable_prefix_caching or longest == 0:
            return []
        return self.index.longest(request.hashes(self.block_size)[:longest])

    def admit(self, request: Request, prefix: Sequence[Block], num_tokens: int) -> list[int] | None:
        """Start a table with ``prefix`` and room for ``num_tokens`` more; its block ids.

        None, and nothing is changed, unless all known tokens of the request would fit into the free blocks now: a
        request that starts without room for its prompt would soon be preempted.
        """
        cached = len(prefix) * self.block_size
        revived = sum(block.ref_count == 0 for block in prefix)
        whole = self._num_blocks(max(request.num_tokens, cached + num_tokens)) - len(prefix)
        if whole > self.pool.num_free - revived:
            return None
        table = self._tables[request.request_id] = _Table()
        self.pool.acquire(prefix)
        table.blocks = [*prefix, *self.pool.allocate(self._num_blocks(cached + num_tokens) - len(prefix))]
        table.num_named = len(prefix)
        return [block.block_id for block in table.blocks]

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for ``num_tokens`` after the computed ones; new block ids. None, unchanged, if there is none."""
        table = self._tables[request.request_id]
        missing = self._num_blocks(request.num_computed_tokens + num_tokens) - len(table.blocks)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        new = self.pool.allocate(missing)
        table.blocks += new
        return [block.block_id for block in new]

    def share(self, request: Request) -> None:
        """Offer the request's full blocks of known tokens, computed or planned to be, to requests scheduled later.

        Call it only when the plan can no longer lose the request's tokens. Plans run in order, and within a step K and
        V of all rows are written before any row attends, so a block may be read by the very step that fills it. (Not so
        with prompt logprobs, for which a step may take several passes: there, blocks are shared when it has come back.)
        """
        table = self._tables[request.request_id]
        in_passes = request.sampling_params.wants_prompt_logprobs
        filled = request.num_confirmed_tokens if in_passes else request.num_computed_tokens
        full = min(filled, request.num_tokens) // self.block_size
        if full <= table.num_named or table.private or not self.enable_prefix_caching:
            return
        hashes = request.hashes(self.block_size)
        for i in range(table.num_named, full):
            self.index.insert(hashes[i], table.blocks[i])
        table.num_named = full

    def sharers(self, request: Request, first_token: int) -> set[str]:
        """Ids of the other requests whose tables hold blocks of ``request`` from ``first_token``'s block on."""
        blocks = self._tables[request.request_id].blocks[first_token // self.block_size :]
        shared = {block.block_id for block in blocks if block.ref_count > 1}
        if not shared:
            return set()
        holders = {key for key, table in self._tables.items() if any(b.block_id in shared for b in table.blocks)}
        return holders - {request.request_id}

    def free(self, request: Request, *, spoiled: bool = False) -> None:
        """Drop the request's table, tail first.

        Blocks whose step has not come back yet lose their names: should it fail, nobody would be left to tell.
        ``spoiled``: the request failed, so all its blocks lose theirs.
        """
        table = self._tables.pop(request.request_id)
        num_sound = 0 if spoiled else request.num_confirmed_tokens // self.block_size
        for block in table.blocks[num_sound : table.num_named]:
            self.index.remove(block)
        self.pool.free(reversed(table.blocks))

    def block_ids(self, request: Request) -> list[int]:
        """The request's block table."""
        return [block.block_id for block in self._tables[request.request_id].blocks]

    def reset_prefix_cache(self) -> None:
        """Forget all shared prefixes; running requests keep their blocks but offer them to nobody any more."""
        self.index.clear()
        for table in self._tables.values():
            table.private = True

    def check_invariants(self, running: Sequence[Request]) -> None:
        """Tables belong to exactly the ``running`` requests and hold their tokens; the pool is sound."""
        if self._tables.keys() != {request.request_id for request in running}:
            raise InvariantError(f"block tables of {sorted(self._tables)}, running {[r.request_id for r in running]}")
        references = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        self.pool.check_invariants(references)
        for request in running:
            held, computed = len(self._tables[request.request_id].blocks), request.num_computed_tokens
            if held != self._num_blocks(computed):
                raise InvariantError(f"{request.request_id} holds {held} blocks for {computed} tokens")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
