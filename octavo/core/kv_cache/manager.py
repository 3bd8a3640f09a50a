"""KVCacheManager: block tables of the requests. The scheduler's only door to KV memory.

Knows requests' lengths and hashes; decides nothing about who runs. Each group of layers has a block for each row of
``block_size`` tokens, all out of one pool, and a request has one flat table: entry ``row * num_groups + group``.

    tokens           0 .. 15   16 .. 31   32 .. 47   48 ..       the next token is number 50
    full                b7        b2         b9        b4
    window of 20        b0        b6         b5        b8        b0: the null block, for tokens that no later one sees

What a group needs is its strategy's to say (``groups.py``). Blocks that no later token sees go back to the pool, and
can still be found by others. One group of full attention is the plain case: the table is a list of blocks, all kept.

    block table     [ b7 ][ b3 ][ b9 ][ b4 ]
    tokens          |<- num_computed_tokens ->| n |
    num_named         2: b7, b3 are full of known tokens and can be found by others

A fork shares every block of its parent, the partly filled one too. A request that writes into a row that others hold
too writes into a copy of it (copy-on-write); the last one to hold it writes in place:

    parent          [ b7 ][ b3 ][ b9. ]             b9 is partly filled
    fork            [ b7 ][ b3 ][ b9. ]             three blocks in all, each with two references
    fork, extended  [ b7 ][ b3 ][ b5.. ]            copies: (b9, b5); now b9 is the parent's alone

An index that finds single tokens may find a prefix that ends within a block of another request. Its first tokens are
copied:

    cached          [ b7 ][ b3 ][ b9 ]              the new request has b7, b3 and the first tokens of b9 in common
    new             [ b7 ][ b3 ][ b6. ]             copies: (b9, b6)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.event_log import NO_EVENTS, EventLog, NullEventLog
from octavo.core.kv_cache.groups import make_groups
from octavo.core.kv_cache.names import block_key
from octavo.core.kv_cache.pins import NO_PINS, PinLimits
from octavo.core.kv_cache.prefix_cache import make_prefix_cache
from octavo.core.kv_cache.prefix_finder import Prefix, PrefixFinder, RunFinder, WindowFinder
from octavo.core.kv_cache.prefix_index import make_index
from octavo.core.kv_cache.swaps import Swap, block_keys
from octavo.core.kv_cache.tier_link import TierLink
from octavo.core.request import Request, RequestStatus
from octavo.exceptions import InvariantError
from octavo.kv_transfer.chain import TierChain
from octavo.messages import FULL, KVMove, KVSpec


class Room(NamedTuple):
    """Where the next tokens go: ``block_ids`` follow the table's own, the last ``num_replaced`` of which are dropped.

    ``copies``: (source, destination) block ids, to be copied before anything is written.
    """

    block_ids: list[int]
    num_replaced: int = 0
    copies: Sequence[tuple[int, int]] = ()


NO_ROOM_NEEDED = Room([])


class _Table:
    __slots__ = ("blocks", "copied_at", "first_rows", "has_twins", "num_named", "num_offered", "private")

    def __init__(
        self,
        blocks: list[Block],
        first_rows: list[int],
        num_tokens: int,
        num_named: int,
        *,
        private: bool = False,
        has_twins: bool = False,
    ) -> None:
        self.blocks = blocks  # row by row, one of each group
        self.first_rows = first_rows  # of each group: rows before it are null
        self.copied_at = num_tokens  # the step that computes this token may first have to copy the block
        self.num_named = num_named  # leading rows offered to the prefix index,
        self.num_offered = num_named  # and, once confirmed, to the tiers
        self.private = private  # never offer more of them
        self.has_twins = has_twins  # of some of those, the index has another one with equal contents


class KVCacheManager:
    """Hands out blocks of ``block_size`` tokens; finds and names shared prefixes unless told not to.

    ``tiers`` keep what the pool gives up, and supply it again; of a request that is swapped out, all that its next
    token sees. What may start is decided by what a request will hold at most, whatever is in flight then.
    """

    __slots__ = (
        "_finder",
        "_gives_back",
        "_groups",
        "_is_plain",
        "_null",
        "_sources",
        "_tables",
        "block_size",
        "cache",
        "enable_prefix_caching",
        "index",
        "num_groups",
        "pool",
        "tiers",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVSpec] = (FULL,),
        tiers: TierChain | None = None,
        *,
        ahead: int = 1,
        enable_prefix_caching: bool = True,
        prefix_index: str = "hash",
        pin_limits: PinLimits = NO_PINS,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | NullEventLog = NO_EVENTS,
    ) -> None:
        """``groups`` and ``ahead``: see ``KVCacheSpec``. Raises ConfigError if there is no strategy for one of them.

        ``prefix_index``: one of ``PREFIX_INDEXES``, for one group that keeps all rows; else prefixes are found by hash.
        """
        self.block_size = block_size
        self._groups = make_groups(groups, block_size, ahead)
        self.num_groups = len(groups)
        self._gives_back = any(group.gives_back for group in self._groups)
        self.enable_prefix_caching = enable_prefix_caching and self.num_groups > 0
        self._is_plain = self.num_groups == 1 and not self._gives_back
        self.tiers = TierLink(tiers or TierChain(), block_size)
        self.cache = make_prefix_cache(
            make_index(prefix_index if self._is_plain else "hash", block_size, self.num_groups, clock),
            num_blocks,
            block_size,
            on_evict=self.tiers.evicted,
            pin_limits=pin_limits,
            events=events,
            clock=clock,
        )
        self.index, self.pool = self.cache.index, self.cache.pool
        self._null = self.pool.blocks[0]
        self._finder: PrefixFinder = (
            RunFinder(self.index, self.tiers, block_size, self._null)
            if self._is_plain
            else WindowFinder(self._groups, self.index, self.tiers, block_size, self._null)
        )
        self._tables: dict[str, _Table] = {}
        self._sources: dict[str, Block] = {}  # by request: what its first step copies, kept until the plan is made

    # ---- starting

    def find_prefix(self, request: Request) -> Prefix:
        """Where the request's first tokens are already, none of those whose logits are needed."""
        if request.request_id in self._tables:
            return Prefix(num_tokens=request.num_computed_tokens)
        return self._finder.find(request, request.num_reusable_tokens if self.enable_prefix_caching else 0)

    def num_missing(self, requests: Sequence[Request]) -> int:
        """Blocks that ``requests``, which have tables, still need for all their known tokens."""
        return sum(self._num_lacking(self._tables[one.request_id], one.num_tokens) for one in requests)

    def _num_lacking(self, table: _Table, num_tokens: int) -> int:
        """Blocks that ``table`` will hold more than now, at most, until it has room for ``num_tokens``."""
        num_rows, held = -(-num_tokens // self.block_size), len(table.blocks)
        if not self._gives_back:
            return max(0, num_rows * self.num_groups - held)
        held //= self.num_groups
        return sum(
            max(0, min(num_rows - first, group.most_rows) - (held - first))
            for first, group in zip(table.first_rows, self._groups)
        )

    def _most_blocks(self, start: int, num_tokens: int) -> int:
        """Blocks that a sequence holds at most while it grows from ``start`` tokens to ``num_tokens``."""
        num_rows = -(-num_tokens // self.block_size)
        return sum(min(num_rows - group.first_row(start), group.most_rows) for group in self._groups)

    def admit(self, request: Request, prefix: Prefix, num_tokens: int, *, reserved: int = 0) -> Room | None:
        """Start a table with ``prefix`` and room for ``num_tokens`` more; ``block_ids`` is the whole table.

        None, and nothing is changed, unless all known tokens of the request would fit now into the free blocks without
        the ``reserved`` ones: a request that starts without room for its prompt would soon be preempted.
        """
        if request.request_id in self._tables:
            room = self.extend(request, num_tokens)
            return room and Room(self.block_ids(request), copies=room.copies)
        blocks, cached, keys, _, source = prefix
        shared = [block for block in blocks if block is not self._null]
        revived = sum(block.ref_count == 0 for block in shared)
        whole = self._most_blocks(cached, max(request.num_tokens, cached + num_tokens)) - len(shared)
        spare = self.pool.num_free - revived - reserved - whole
        if spare < 0:
            return None
        self.pool.acquire(shared)
        if self.tiers.chain:
            self.tiers.chain.used([block.key for block in shared if block.key is not None])
        num_rows = prefix.num_local // self.block_size
        for block in blocks[max(0, num_rows - 1) * self.num_groups : num_rows * self.num_groups]:
            self.index.names.used(block)
        taken = [] if source is None else self._take(request, source, spare)
        self.tiers.chain.pin(keys)  # what is evicted now goes to a tier, and must not push them out
        new = self._allocate(self._num_entries(cached + num_tokens) - len(blocks) + len(keys) - len(taken))
        first_rows = self._first_rows(cached)
        table = _Table([*blocks, *taken, *new[len(keys) :]], first_rows, cached, num_rows)
        self._tables[request.request_id] = table
        if keys:
            self._load(request, table, keys, new)
        self.tiers.swaps.drop(request.request_id)
        copied = self._sources.get(request.request_id)
        copies = [(copied.block_id, table.blocks[len(blocks)].block_id)] if copied is not None else []
        return Room(_ids(table.blocks), copies=copies)

    def _load(self, request: Request, table: _Table, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """Fill the null entries of ``table`` that the next token sees: with the first ``blocks``, loaded from tiers."""
        entries = (
            entry
            for entry, block in enumerate(table.blocks)
            if block is self._null and entry // self.num_groups >= table.first_rows[entry % self.num_groups]
        )
        for key, block, entry in list(zip(keys, blocks, entries, strict=False)):
            table.blocks[entry] = block
            self.tiers.chain.load(key, block.block_id)
            self.tiers.fills(block, request)
        self.tiers.chain.release(keys)

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

    # ---- growing

    def extend(self, request: Request, num_tokens: int) -> Room | None:
        """Make room for ``num_tokens`` after the computed ones. None if there is none.

        Either way, blocks that no later token sees go back first; nothing else is changed if there is no room.
        """
        table, start, width = self._tables[request.request_id], request.num_computed_tokens, self.num_groups
        if self._gives_back:
            self._give_back(request, table)
        blocks = table.blocks
        row, rest = divmod(start, self.block_size)
        missing = self._num_entries(start + num_tokens) - len(blocks)
        last = blocks[row * width : (row + 1) * width] if rest else ()  # partly filled; full ones stay as they are
        for block in last:
            if block.ref_count > 1:
                return self._extend_copied(table, start, missing + width)
        if missing > 0 and missing > self.pool.num_free:
            return None
        for block in last:
            if block.entry is not None:
                self.index.remove(block)  # named by a request that had filled it and is gone
        if missing <= 0:
            return NO_ROOM_NEEDED
        new = self._allocate(missing)
        blocks += new
        return Room(_ids(new))

    def _extend_copied(self, table: _Table, start: int, missing: int) -> Room | None:
        """``missing`` new blocks, the first ones in place of the table's last row, which others hold too."""
        if missing > self.pool.num_free:
            return None
        width = self.num_groups
        new, sources = self._allocate(missing), table.blocks[-width:]
        self.pool.free(sources)
        table.blocks[-width:] = new
        table.copied_at = start
        return Room(_ids(new), width, list(zip(_ids(sources), _ids(new), strict=False)))

    def _give_back(self, request: Request, table: _Table) -> None:
        """Give back what no token after the confirmed ones sees. No step that fills it may still be in flight."""
        self._offer(request, table)
        dropped = []
        seen = min(request.num_computed_tokens, request.num_confirmed_tokens)
        for group, first in enumerate(self._first_rows(seen)):
            for row in range(table.first_rows[group], first):
                entry = row * self.num_groups + group
                dropped.append(table.blocks[entry])
                table.blocks[entry] = self._null
            table.first_rows[group] = max(first, table.first_rows[group])
        self.pool.free(dropped)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Give ``child`` a table: the blocks of the first ``num_tokens`` (computed) tokens of ``parent``, shared.

        Raises InvariantError if the parent has given back some that the child's next token sees.
        """
        source = self._tables[parent.request_id]
        if any(held > wanted for held, wanted in zip(source.first_rows, self._first_rows(num_tokens))):
            raise InvariantError(f"{parent.request_id} no longer has what follows its first {num_tokens} tokens")
        table = self._tables[child.request_id] = _Table(
            source.blocks[: self._num_entries(num_tokens)],
            list(source.first_rows),
            num_tokens,
            min(source.num_named, num_tokens // self.block_size),
            private=source.private,
            has_twins=source.has_twins,
        )
        self.pool.acquire(self._held(table))

    # ---- giving way

    def swap_out(self, request: Request, copies: Sequence[tuple[int, int]] = ()) -> None:
        """Keep all that the next token sees in a tier, see ``TierLink.swap_out``; then :meth:`free` the request."""
        num_tokens, table = request.num_confirmed_tokens, self._tables[request.request_id]
        rows, firsts = block_keys(request, num_tokens, self.block_size), self._first_rows(num_tokens)
        seen = [(row, group) for row in range(len(rows)) for group, first in enumerate(firsts) if row >= first]
        blocks = [table.blocks[row * self.num_groups + group] for row, group in seen]
        if self._null not in blocks:  # a load that has not come back was for a later token, which sees less
            swap = Swap([block_key(rows[row], group) for row, group in seen], num_tokens)
            self.tiers.swap_out(request, swap, _ids(blocks), copies, whole=not self._is_plain)

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

        True if some block would become free, or those of its own last row would no longer be shared.
        """
        held = self._references(holders)
        if any(self.pool.blocks[block_id].ref_count == count for block_id, count in held.items()):
            return True
        own = self._tables.get(request.request_id)
        last = own.blocks[-self.num_groups :] if own is not None else []
        shared = [block for block in last if block.ref_count > 1]
        return bool(shared) and all(block.ref_count == held[block.block_id] + 1 for block in shared)

    def would_fit(self, request: Request, holders: Sequence[Request], *, reserved: int = 0) -> bool:
        """Would all known tokens of a waiting ``request`` find room, as in ``admit``, if ``holders`` dropped theirs?"""
        held, own = self._references(holders), self._tables.get(request.request_id)
        free = self.pool.num_free + sum(self.pool.blocks[i].ref_count == count for i, count in held.items())
        if own is not None:
            last = own.blocks[-self.num_groups :] if request.num_computed_tokens % self.block_size else []
            copies = self.num_groups * any(block.ref_count > 1 for block in last)
            return self._num_lacking(own, request.num_tokens) + copies <= free
        prefix = self.find_prefix(request)
        shared = [block for block in prefix.blocks if block is not self._null]
        taken = sum(block.ref_count == held[block.block_id] for block in shared)  # of the free ones
        return self._most_blocks(prefix.num_tokens, request.num_tokens) - len(shared) <= free - taken - reserved

    def free(self, request: Request, *, spoiled: bool = False) -> None:
        """Drop the request's table, tail first.

        Blocks whose step has not come back yet lose their names: should it fail, no request would be left to tell.
        ``spoiled``: the request failed, so all its blocks lose theirs; those given back before keep them, for their
        steps were sound. Else, in the plain case, its last one, partly filled, is cached too.
        """
        table, confirmed = self._tables.pop(request.request_id), request.num_confirmed_tokens
        if spoiled:
            groups = range(self.num_groups)
            self.tiers.chain.forget([block_key(row, group) for row in request.block_hashes for group in groups])
        else:
            self._offer(request, table)
        num_sound = 0 if spoiled else confirmed // self.block_size
        for block in table.blocks[num_sound * self.num_groups : table.num_named * self.num_groups]:
            self.index.remove(block)
        may_name = self._is_plain and self.enable_prefix_caching and not (spoiled or table.private)
        if may_name and confirmed > table.copied_at:
            self.index.insert(request, table.blocks, min(confirmed, request.num_tokens), first=table.num_named)
        if (source := self._sources.pop(request.request_id, None)) is not None:
            self.pool.free([source])
        self.pool.free(reversed(self._held(table)))
        if table.has_twins and num_sound > 0:
            self.pool.touch(reversed(self.index.match(request, num_sound * self.block_size).blocks))

    # ---- sharing

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
        new = table.blocks[table.num_named * self.num_groups : full * self.num_groups]
        if self._is_plain:
            num_sound = request.num_confirmed_tokens // self.block_size
            unsure = table.blocks[max(num_sound, table.num_named) : full]
        else:
            unsure = [block for block in new if block is not self._null and not block.is_cached]
        self.index.insert(request, table.blocks, full * self.block_size, first=table.num_named)
        for block in unsure:
            self.tiers.fills(block, request)
        table.has_twins |= self._is_plain and not all(block.is_cached for block in new)
        table.num_named = full

    def _offer(self, request: Request, table: _Table) -> None:
        """Tell the tiers of blocks that have a name, and whose step has come back."""
        end = min(request.num_confirmed_tokens // self.block_size, table.num_named)
        if self.tiers.chain:
            for entry in range(table.num_offered * self.num_groups, end * self.num_groups):
                (row, group), block = divmod(entry, self.num_groups), table.blocks[entry]
                if block is not self._null:
                    key = block_key(request.hashes(self.block_size)[row], group)
                    self.tiers.chain.filled(key, block.block_id)
        table.num_offered = max(table.num_offered, end)

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Keys of the blocks that the token after these rows, a sequence from its beginning, needs."""
        firsts = list(enumerate(self._first_rows(len(hashes) * self.block_size)))
        rows = enumerate(hashes)
        return [block_key(row_hash, group) for row, row_hash in rows for group, first in firsts if row >= first]

    def adopt(self, request: Request, blocks: Mapping[bytes, Block]) -> None:
        """Cache ``blocks``, by key, that hold leading rows of ``request``, which has no table."""
        groups = range(self.num_groups)
        keys = [block_key(row_hash, group) for row_hash in request.hashes(self.block_size) for group in groups]
        table = [blocks.get(key, self._null) for key in keys]
        while table and table[-1] is self._null:
            table.pop()
        self.index.insert(request, table, len(table) // self.num_groups * self.block_size)

    def sharers(self, request: Request, first_token: int) -> set[str]:
        """Ids of the other requests whose tables hold blocks of ``request`` from ``first_token``'s row on."""
        entry = first_token // self.block_size * self.num_groups
        shared = {block.block_id for block in self._tables[request.request_id].blocks[entry:] if block.ref_count > 1}
        if not shared:
            return set()
        holders = {key for key, table in self._tables.items() if any(b.block_id in shared for b in table.blocks)}
        return holders - {request.request_id}

    def spoil(self, spoiled: Mapping[int, str]) -> set[str]:
        """Blocks hold anything, and lose their names. Ids of the requests that hold some.

        ``spoiled``: by block id, the request to blame, which holds it rightly.
        """
        for block_id in spoiled:
            self.index.remove(self.pool.blocks[block_id])
        return self.tiers.misled(spoiled, {key: table.blocks for key, table in self._tables.items()})

    def reset_prefix_cache(self) -> None:
        """Forget all shared prefixes; running requests keep their blocks and share no more of them."""
        self.index.clear()
        self.tiers.clear()
        for table in self._tables.values():
            table.private = True

    # ---- what there is

    def block_ids(self, request: Request) -> list[int]:
        """The request's flat block table; 0 for what was given back."""
        return _ids(self._tables[request.request_id].blocks)

    def check_invariants(self, holders: Sequence[Request]) -> None:
        """Tables belong to exactly the ``holders`` and hold what their next tokens see; the pool is sound."""
        if self._tables.keys() != {request.request_id for request in holders}:
            raise InvariantError(f"block tables of {sorted(self._tables)}, not of {[r.request_id for r in holders]}")
        references = self._references(holders)
        references.update(block.block_id for block in self.cache.pins.held)
        self.pool.check_invariants(references)
        for request in holders:
            table, wanted = self._tables[request.request_id], request.num_covered_tokens
            if len(table.blocks) != self._num_entries(wanted):
                raise InvariantError(f"{request.request_id} has {len(table.blocks)} entries for {wanted} tokens")
            firsts = self._first_rows(request.num_computed_tokens)
            if any(held > first for held, first in zip(table.first_rows, firsts)):
                raise InvariantError(f"{request.request_id} gave back what its next token sees: {table.first_rows}")
            for entry, block in enumerate(table.blocks):
                row, group = divmod(entry, self.num_groups)
                if (block is self._null) != (row < table.first_rows[group]):
                    raise InvariantError(f"{request.request_id}: {block} in row {row} of group {group}")

    def _references(self, holders: Sequence[Request]) -> Counter[int]:
        """How often the tables of ``holders`` contain each block, by its id."""
        return Counter(block.block_id for one in holders for block in self._held(self._tables[one.request_id]))

    def _held(self, table: _Table) -> Sequence[Block]:
        """The blocks of ``table``, without the null block."""
        return [block for block in table.blocks if block is not self._null] if self._gives_back else table.blocks

    def _allocate(self, count: int) -> list[Block]:
        blocks = self.pool.allocate(count)
        self.tiers.reused(blocks)
        return blocks

    def _num_entries(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.num_groups

    def _first_rows(self, num_tokens: int) -> list[int]:
        return [group.first_row(num_tokens) for group in self._groups]


def _ids(blocks: Iterable[Block]) -> list[int]:
    return [block.block_id for block in blocks]
