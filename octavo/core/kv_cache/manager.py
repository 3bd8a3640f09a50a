"""KVCacheManager: block tables of the requests. The scheduler's only door to KV memory.

Knows requests' lengths and hashes; decides nothing about who runs.

    block table     [ b7 ][ b3 ][ b9 ][ b4 ]        block_size tokens each
    tokens          |<- num_computed_tokens ->| n |
    num_named         2: b7, b3 are full of known tokens and can be found by others

A fork shares every block of its parent, the partly filled one too. Whoever is the first to write into a shared block
writes into a copy of it (copy-on-write); the last one to hold it writes in place:

    parent          [ b7 ][ b3 ][ b9. ]             b9 is partly filled
    fork            [ b7 ][ b3 ][ b9. ]             three blocks in all, each with two references
    fork, extended  [ b7 ][ b3 ][ b5.. ]            copies: (b9, b5); now b9 is the parent's alone

An index that finds single tokens may find a prefix that ends within somebody else's block. Its first tokens are copied:

    cached          [ b7 ][ b3 ][ b9 ]              the new request has b7, b3 and the first tokens of b9 in common
    new             [ b7 ][ b3 ][ b6. ]             copies: (b9, b6)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.event_log import NO_EVENTS, EventLog, NullEventLog
from octavo.core.kv_cache.pins import NO_PINS, PinLimits
from octavo.core.kv_cache.prefix_cache import make_prefix_cache
from octavo.core.kv_cache.prefix_index import make_index
from octavo.core.kv_cache.swaps import Swap, block_keys
from octavo.core.kv_cache.tier_link import TierLink
from octavo.core.request import Request, RequestStatus
from octavo.exceptions import InvariantError
from octavo.kv_transfer.chain import TierChain
from octavo.messages import KVMove


class Prefix(NamedTuple):
    """Where the first ``num_tokens`` tokens of a request are: in ``blocks``, then under ``keys`` in tiers.

    Or the last ones are the first ones in ``source``. With none of these, they are in its own table already.
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


class Room(NamedTuple):
    """Where the next tokens go: ``block_ids`` follow the table's own, the last ``num_replaced`` of which are dropped.

    ``copies``: (source, destination) block ids, to be copied before anything is written.
    """

    block_ids: list[int]
    num_replaced: int = 0
    copies: Sequence[tuple[int, int]] = ()


NO_ROOM_NEEDED = Room([])


class _Table:
    __slots__ = ("blocks", "copied_at", "has_twins", "num_named", "num_offered", "private")

    def __init__(self, num_tokens: int) -> None:
        self.blocks: list[Block] = []
        self.copied_at = num_tokens  # the step that computes this token may first have to copy the block
        self.num_named = 0  # leading blocks offered to the prefix index,
        self.num_offered = 0  # and, once confirmed, to the tiers
        self.has_twins = False  # of some of those, the index has another one with equal contents
        self.private = False  # never offer more of them


class KVCacheManager:
    """Hands out blocks of ``block_size`` tokens; finds and names shared prefixes unless told not to.

    ``tiers`` keep what the pool gives up, and supply it again.
    """

    num_groups = 1

    __slots__ = ("_sources", "_tables", "block_size", "cache", "enable_prefix_caching", "index", "pool", "tiers")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tiers: TierChain | None = None,
        *,
        enable_prefix_caching: bool = True,
        prefix_index: str = "hash",
        pin_limits: PinLimits = NO_PINS,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | NullEventLog = NO_EVENTS,
    ) -> None:
        """``prefix_index``: one of ``PREFIX_INDEXES``."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = TierLink(tiers or TierChain(), block_size)
        self.cache = make_prefix_cache(
            make_index(prefix_index, block_size, 1, clock),
            num_blocks,
            block_size,
            on_evict=self.tiers.evicted,
            pin_limits=pin_limits,
            events=events,
            clock=clock,
        )
        self.index, self.pool = self.cache.index, self.cache.pool
        self._tables: dict[str, _Table] = {}
        self._sources: dict[str, Block] = {}  # by request: what its first step copies, kept until the plan is made

    def find_prefix(self, request: Request) -> Prefix:
        """Where the request's first tokens are already, none of those whose logits are needed."""
        if request.request_id in self._tables:
            return Prefix(num_tokens=request.num_computed_tokens)
        longest = request.num_reusable_tokens if self.enable_prefix_caching else 0
        blocks, source, num_shared = self.index.match(request, longest)
        found, local = len(blocks), len(blocks) * self.block_size
        own, end = self.tiers.swaps.find(request, found)
        keys = self.tiers.find(request, found, longest // self.block_size)
        external = len(keys) * self.block_size
        if source is not None and not keys and num_shared > end - local and not self.tiers.is_filling(source.block_id):
            return Prefix(blocks, local + num_shared, source=source)
        if end > local + external:
            return Prefix(blocks, end, own, end - local)
        return Prefix(blocks, local + external, keys, external)

    def num_missing(self, requests: Sequence[Request]) -> int:
        """Blocks that ``requests``, which have tables, still need for all their known tokens."""
        held = self._tables
        return sum(max(0, self._num_blocks(r.num_tokens) - len(held[r.request_id].blocks)) for r in requests)

    def admit(self, request: Request, prefix: Prefix, num_tokens: int, *, reserved: int = 0) -> Room | None:
        """Start a table with ``prefix`` and room for ``num_tokens`` more; ``block_ids`` is the whole table.

        None, and nothing is changed, unless all known tokens of the request would fit now into the free blocks without
        the ``reserved`` ones: a request that starts without room for its prompt would soon be preempted.
        """
        if request.request_id in self._tables:
            room = self.extend(request, num_tokens)
            return room and Room(self.block_ids(request), copies=room.copies)
        blocks, cached, keys, _, source = prefix
        revived = sum(block.ref_count == 0 for block in blocks)
        whole = self._num_blocks(max(request.num_tokens, cached + num_tokens)) - len(blocks)
        spare = self.pool.num_free - revived - reserved - whole
        if spare < 0:
            return None
        table = self._tables[request.request_id] = _Table(cached)
        self.pool.acquire(blocks)
        self.tiers.chain.used(request.block_hashes[: len(blocks)])
        if blocks:
            self.index.names.used(blocks[-1])
        taken = [] if source is None else self._take(request, source, spare)
        self.tiers.chain.pin(keys)  # what is evicted now goes to a tier, and must not push them out
        new = self._num_blocks(cached + num_tokens) - len(blocks) - len(taken)
        table.blocks = [*blocks, *taken, *self._allocate(new)]
        table.num_named = table.num_offered = len(blocks)
        for key, block in zip(keys, table.blocks[len(blocks) :]):
            self.tiers.chain.load(key, block.block_id)
            self.tiers.fills(block, request)
        self.tiers.chain.release(keys)
        self.tiers.swaps.drop(request.request_id)
        copied = self._sources.get(request.request_id)
        copies = [(copied.block_id, table.blocks[len(blocks)].block_id)] if copied is not None else []
        return Room([block.block_id for block in table.blocks], copies=copies)

    def _take(self, request: Request, source: Block, spare: int) -> list[Block]:
        """Have ``source``, which nothing may overwrite now, copied by the step. If it fills the last room: take it."""
        self.pool.acquire([source])
        if source.ref_count == 1 and spare == 0:
            self.index.remove(source)
            return [source]
        self._sources[request.request_id] = source
        return []

    def take_moves(self, step_id: int) -> list[KVMove]:
        """The plan is made: see ``TierLink.take_moves``. What it copies may be overwritten from the next one on."""
        self.pool.free(self._sources.values())
        self._sources.clear()
        return self.tiers.take_moves(step_id)

    def swap_out(self, request: Request, copies: Sequence[tuple[int, int]] = ()) -> None:
        """See ``TierLink.swap_out``; then :meth:`free` it."""
        num_tokens = request.num_confirmed_tokens
        keys = block_keys(request, num_tokens, self.block_size)
        self.tiers.swap_out(request, Swap(keys, num_tokens), self.block_ids(request)[: len(keys)], copies)

    def spoil(self, spoiled: Mapping[int, str]) -> set[str]:
        """Blocks hold anything, and lose their names. Ids of the requests that hold some.

        ``spoiled``: by block id, the request to blame, which holds it rightly.
        """
        for block_id in spoiled:
            self.index.remove(self.pool.blocks[block_id])
        return self.tiers.misled(spoiled, {key: table.blocks for key, table in self._tables.items()})

    def extend(self, request: Request, num_tokens: int) -> Room | None:
        """Make room for ``num_tokens`` after the computed ones. None, and nothing is changed, if there is none."""
        table, start = self._tables[request.request_id], request.num_computed_tokens
        blocks = table.blocks
        missing = self._num_blocks(start + num_tokens) - len(blocks)
        full, rest = divmod(start, self.block_size)
        last = blocks[full] if rest else None  # partly filled; full ones are never written again
        if last is not None and last.ref_count > 1:
            return self._extend_copied(table, start, missing + 1)
        if missing > self.pool.num_free:
            return None
        if last is not None and last.is_cached:
            self.index.remove(last)  # its name is from one who had filled it and is gone
        if missing <= 0:
            return NO_ROOM_NEEDED
        new = self._allocate(missing)
        blocks += new
        return Room([block.block_id for block in new])

    def _extend_copied(self, table: _Table, start: int, missing: int) -> Room | None:
        """``missing`` new blocks, the first one in place of the table's last, which others hold too."""
        if missing > self.pool.num_free:
            return None
        new, source = self._allocate(missing), table.blocks.pop()
        self.pool.free([source])
        table.blocks += new
        table.copied_at = start
        return Room([block.block_id for block in new], 1, [(source.block_id, new[0].block_id)])

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Give ``child`` a table: the blocks of the first ``num_tokens`` (computed) tokens of ``parent``, shared."""
        source = self._tables[parent.request_id]
        table = self._tables[child.request_id] = _Table(num_tokens)
        table.blocks = source.blocks[: self._num_blocks(num_tokens)]
        table.num_named = table.num_offered = min(source.num_named, num_tokens // self.block_size)
        table.private, table.has_twins = source.private, source.has_twins
        self.pool.acquire(table.blocks)

    def reclaim(self, request: Request, others: Iterable[Request]) -> bool:
        """Take the table of the last one of ``others`` that has one without running, for ``request`` to find room.

        It is a fork, and swapped out, or computed again when it runs. False, and nothing is changed, if all such would
        not help.
        """
        running = RequestStatus.RUNNING
        holders = [one for one in others if one.status is not running and one.holds_blocks and one is not request]
        if not self.can_gain(request, holders):
            return False
        self.swap_out(holders[-1])
        self.free(holders[-1])
        holders[-1].hold(0)
        return True

    def can_gain(self, request: Request, holders: Sequence[Request]) -> bool:
        """Would ``request`` need less, or find more, if all of ``holders`` (others) dropped their tables?

        True if some block would become free, or its own last one would no longer be shared.
        """
        held = Counter(block.block_id for holder in holders for block in self._tables[holder.request_id].blocks)
        if any(self.pool.blocks[block_id].ref_count == count for block_id, count in held.items()):
            return True
        own = self._tables.get(request.request_id)
        last = own.blocks[-1] if own is not None else None
        return last is not None and last.block_id in held and last.ref_count == held[last.block_id] + 1

    def would_fit(self, request: Request, holders: Sequence[Request], *, reserved: int = 0) -> bool:
        """Would all known tokens of a waiting ``request`` find room, as in ``admit``, if ``holders`` dropped theirs?"""
        held = Counter(block.block_id for holder in holders for block in self._tables[holder.request_id].blocks)
        own = self._tables.get(request.request_id)
        blocks = self.find_prefix(request).blocks if own is None else own.blocks
        free = self.pool.num_free + sum(self.pool.blocks[i].ref_count == count for i, count in held.items())
        taken = sum(block.ref_count == held[block.block_id] for block in blocks)  # of the free ones; 0 if nobody has it
        missing = self._num_blocks(request.num_tokens) - len(blocks)
        if own is not None:
            copies = request.num_computed_tokens % self.block_size != 0 and blocks[-1].ref_count > 1
            taken, missing = 0, missing + copies
        return missing <= free - taken - (reserved if own is None else 0)

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
        if table.num_offered < table.num_named:
            self._offer(request, table)
        if full <= table.num_named or table.private or not self.enable_prefix_caching:
            return
        self.index.insert(request, table.blocks, full * self.block_size, first=table.num_named)
        confirmed = request.num_confirmed_tokens // self.block_size
        for block in table.blocks[max(confirmed, table.num_named) : full]:
            self.tiers.fills(block, request)
        table.has_twins |= not all(block.is_cached for block in table.blocks[table.num_named : full])
        table.num_named = full

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Keys of the blocks that the token after these rows, a sequence from its beginning, needs."""
        return hashes

    def adopt(self, request: Request, blocks: Mapping[bytes, Block]) -> None:
        """Cache ``blocks``, by key, that hold leading rows of ``request``, which has no table."""
        rows = [blocks[name] for name in takewhile(blocks.__contains__, request.block_hashes)]
        self.index.insert(request, rows, len(rows) * self.block_size)

    def _offer(self, request: Request, table: _Table) -> None:
        """Tell the tiers of blocks that have a name, and whose step has come back."""
        end = min(request.num_confirmed_tokens // self.block_size, table.num_named)
        for i in range(table.num_offered, end):
            self.tiers.chain.filled(request.hashes(self.block_size)[i], table.blocks[i].block_id)
        table.num_offered = max(table.num_offered, end)

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
        ``spoiled``: the request failed, so all its blocks lose theirs. Else its last one, partly filled, is cached too.
        """
        table, confirmed = self._tables.pop(request.request_id), request.num_confirmed_tokens
        if spoiled:
            self.tiers.chain.forget(request.block_hashes)
        else:
            self._offer(request, table)
        num_sound = 0 if spoiled else confirmed // self.block_size
        for block in table.blocks[num_sound : table.num_named]:
            self.index.remove(block)
        if confirmed > table.copied_at and not (spoiled or table.private) and self.enable_prefix_caching:
            self.index.insert(request, table.blocks, min(confirmed, request.num_tokens), first=table.num_named)
        if (source := self._sources.pop(request.request_id, None)) is not None:
            self.pool.free([source])
        self.pool.free(reversed(table.blocks))
        if table.has_twins and num_sound > 0:
            self.pool.touch(reversed(self.index.match(request, num_sound * self.block_size).blocks))

    def block_ids(self, request: Request) -> list[int]:
        """The request's block table."""
        return [block.block_id for block in self._tables[request.request_id].blocks]

    def reset_prefix_cache(self) -> None:
        """Forget all shared prefixes; running requests keep their blocks but offer them to nobody any more."""
        self.index.clear()
        self.tiers.clear()
        for table in self._tables.values():
            table.private = True

    def check_invariants(self, holders: Sequence[Request]) -> None:
        """Tables belong to exactly the ``holders`` and hold their tokens; the pool is sound."""
        if self._tables.keys() != {request.request_id for request in holders}:
            raise InvariantError(f"block tables of {sorted(self._tables)}, not of {[r.request_id for r in holders]}")
        references = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        references.update(block.block_id for block in self.cache.pins.held)
        self.pool.check_invariants(references)
        for request in holders:
            held, wanted = len(self._tables[request.request_id].blocks), request.num_covered_tokens
            if held != self._num_blocks(wanted):
                raise InvariantError(f"{request.request_id} holds {held} blocks for {wanted} tokens")

    def _allocate(self, count: int) -> list[Block]:
        blocks = self.pool.allocate(count)
        self.tiers.reused(blocks)
        return blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
