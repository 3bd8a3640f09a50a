"""GroupedKVCacheManager: block tables of models some or all of whose layers have sliding windows.

Layers of one window are a group (several, if there are many: each has as many layers as a block has room for), and a
request has a block table for each group, all out of one pool. Entry ``row * num_groups + group`` of the flat table is
the block of the group's tokens ``[row * block_size, (row + 1) * block_size)``:

    tokens         0 .. 15   16 .. 31   32 .. 47   48 ..       window 20, next token 50
    full              b7        b2         b9        b4
    window 20         b0        b6         b5        b8        b0: the null block, for tokens that nobody sees again

Blocks that lie before the window of a request's next token go back to the pool, their names kept: a prefix is found if
all its blocks of full groups are there, and of each other group those that its next token sees.

Tiers keep the blocks of each group by themselves; a request is swapped out with all that its next token sees, or not.

Does everything else as ``KVCacheManager``. What may start is decided by what a request will hold at most, whatever is
in flight then: the blocks of a window, and those of the tokens planned before the first of them has come back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.event_log import NO_EVENTS, EventLog, NullEventLog
from octavo.core.kv_cache.manager import NO_ROOM_NEEDED, KVCacheManager, Prefix, Room
from octavo.core.kv_cache.names import block_key
from octavo.core.kv_cache.pins import NO_PINS, PinLimits
from octavo.core.kv_cache.prefix_cache import make_prefix_cache
from octavo.core.kv_cache.prefix_index import make_index
from octavo.core.kv_cache.swaps import Swap, block_keys
from octavo.core.kv_cache.tier_link import TierLink
from octavo.core.request import Request, RequestStatus
from octavo.exceptions import InvariantError
from octavo.kv_transfer.chain import TierChain
from octavo.messages import KVMove, KVSpec

Place = Block | bytes | None
"""Where the contents of a block are: in the pool, under a key in a tier, or nowhere."""


class _Table:
    __slots__ = ("blocks", "first", "num_named", "num_offered", "private")

    def __init__(self, blocks: list[Block], first: list[int], num_named: int, *, private: bool = False) -> None:
        self.blocks = blocks  # row by row, a block of each group
        self.first = first  # of each group: rows before it are null
        self.num_named = num_named  # leading rows offered to the prefix index,
        self.num_offered = num_named  # and, once confirmed, to the tiers
        self.private = private  # never offer more of them


class GroupedKVCacheManager:
    """As ``KVCacheManager``; ``specs`` (its groups) and ``ahead`` are those of the ``KVCacheSpec``."""

    __slots__ = (
        *("_most", "_null", "_tables", "_windows", "block_size", "cache", "enable_prefix_caching", "index", "pool"),
        "tiers",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        specs: Sequence[KVSpec],
        tiers: TierChain | None = None,
        *,
        enable_prefix_caching: bool = True,
        ahead: int = 1,
        pin_limits: PinLimits = NO_PINS,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | NullEventLog = NO_EVENTS,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = TierLink(tiers or TierChain(), block_size)
        self.cache = make_prefix_cache(
            make_index("hash", block_size, len(specs), clock),
            num_blocks,
            block_size,
            on_evict=self.tiers.evicted,
            pin_limits=pin_limits,
            events=events,
            clock=clock,
        )
        self.index, self.pool = self.cache.index, self.cache.pool
        self._null = self.pool.blocks[0]
        self._windows = tuple(spec.window for spec in specs)
        self._most = [spec.most_rows(block_size, ahead) for spec in specs]
        self._tables: dict[str, _Table] = {}

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    def find_prefix(self, request: Request) -> Prefix:
        """Where the request's first tokens are already, none of those whose logits are needed.

        ``blocks`` is a flat table, null where the next token sees nothing and, in order, for each of ``keys``.
        """
        if request.request_id in self._tables:
            return Prefix(num_tokens=request.num_computed_tokens)
        longest = request.num_reusable_tokens // self.block_size if self.enable_prefix_caching else 0
        hashes, can_load = request.hashes(self.block_size)[:longest], self.tiers.chain.finder()
        rows, runs, best = [], [0] * self.num_groups, 0  # runs: rows up to here that each group has without a gap
        for block_hash in hashes:
            rows.append(self._places(block_hash, can_load))
            runs = [0 if place is None else run + 1 for place, run in zip(rows[-1], runs)]
            if any(run < len(rows) and window is None for run, window in zip(runs, self._windows)):
                break
            first = self._first_rows(len(rows) * self.block_size)
            if all(run >= len(rows) - row for run, row in zip(runs, first)):
                best = len(rows)
        swap = self.tiers.swaps.of(request)
        if swap is not None and swap.num_tokens > best * self.block_size:
            keys = block_keys(request, swap.num_tokens, self.block_size)
            own = [self._places(key, can_load, in_pool=i < longest) for i, key in enumerate(keys)]
            if self._is_whole(own, swap.num_tokens):
                return self._prefix(own, swap.num_tokens)
        return self._prefix(rows[:best], best * self.block_size)

    def _places(self, key: bytes, can_load: Callable[[bytes], bool], *, in_pool: bool = True) -> list[Place]:
        """Where each group's block with contents ``key`` is."""
        names, cached = [block_key(key, group) for group in range(self.num_groups)], self.index.names.blocks
        blocks = [cached.get(name) if in_pool else None for name in names]
        return [block or (name if can_load(name) else None) for block, name in zip(blocks, names)]

    def _is_whole(self, rows: Sequence[Sequence[Place]], num_tokens: int) -> bool:
        first = self._first_rows(num_tokens)
        return all(row[group] is not None for group, start in enumerate(first) for row in rows[start:])

    def _prefix(self, rows: Sequence[Sequence[Place]], num_tokens: int) -> Prefix:
        """``num_tokens`` tokens that are in these places."""
        first = self._first_rows(num_tokens)
        seen = [place if i >= first[group] else None for i, row in enumerate(rows) for group, place in enumerate(row)]
        blocks = [place if isinstance(place, Block) else self._null for place in seen]
        keys = [place for place in seen if isinstance(place, bytes)]
        first_key = next((i for i, place in enumerate(seen) if isinstance(place, bytes)), len(seen))
        local = min(num_tokens, first_key // self.num_groups * self.block_size)
        return Prefix(blocks, num_tokens, keys, num_tokens - local)

    def num_missing(self, requests: Sequence[Request]) -> int:
        """Blocks that ``requests``, which have tables, still need for all their known tokens."""
        return sum(self._num_lacking(self._tables[one.request_id], one.num_tokens) for one in requests)

    def _num_lacking(self, table: _Table, num_tokens: int) -> int:
        """Blocks that ``table`` will hold more than now, at most, until it has room for ``num_tokens``."""
        num_rows, held = -(-num_tokens // self.block_size), len(table.blocks) // self.num_groups
        return sum(max(0, min(num_rows - first, most) - (held - first)) for first, most in zip(table.first, self._most))

    def _most_blocks(self, start: int, num_tokens: int) -> int:
        """Blocks that a sequence holds at most while it grows from ``start`` tokens to ``num_tokens``."""
        num_rows = -(-num_tokens // self.block_size)
        return sum(min(num_rows - first, most) for first, most in zip(self._first_rows(start), self._most))

    def admit(self, request: Request, prefix: Prefix, num_tokens: int, *, reserved: int = 0) -> Room | None:
        """See ``KVCacheManager.admit``."""
        if request.request_id in self._tables:
            room = self.extend(request, num_tokens)
            return room and Room(self.block_ids(request), copies=room.copies)
        blocks, cached, keys = prefix.blocks, prefix.num_tokens, prefix.keys
        shared = self._real(blocks)
        revived = sum(block.ref_count == 0 for block in shared)
        whole = self._most_blocks(cached, max(request.num_tokens, cached + num_tokens)) - len(shared)
        if whole > self.pool.num_free - revived - reserved:
            return None
        self.pool.acquire(shared)
        self.tiers.chain.used(block.key for block in shared if block.key is not None)
        end = prefix.num_local // self.block_size * self.num_groups
        for block in blocks[max(0, end - self.num_groups) : end]:
            self.index.names.used(block)
        self.tiers.chain.pin(keys)  # what is evicted now goes to a tier, and must not push them out
        first = self._first_rows(cached)
        holes = [
            i
            for i, block in enumerate(blocks)
            if block is self._null and i // self.num_groups >= first[i % self.num_groups]
        ]
        new = self._allocate(self._num_entries(cached + num_tokens) - len(blocks) + len(keys))
        table = self._tables[request.request_id] = _Table(
            [*blocks, *new[len(keys) :]], first, prefix.num_local // self.block_size
        )
        for entry, key, block in zip(holes, keys, new, strict=False):
            table.blocks[entry] = block
            self.tiers.chain.load(key, block.block_id)
            self.tiers.fills(block, request)
        self.tiers.chain.release(keys)
        self.tiers.swaps.drop(request.request_id)
        return Room(_ids(table.blocks))

    def extend(self, request: Request, num_tokens: int) -> Room | None:
        """Make room for ``num_tokens`` after the computed ones; None if there is none.

        Either way, blocks before the windows go back first.
        """
        table, start = self._tables[request.request_id], request.num_computed_tokens
        self._offer(request, table)
        self._drop(table, min(start, request.num_confirmed_tokens))
        blocks = table.blocks
        missing = self._num_entries(start + num_tokens) - len(blocks)
        row, rest = divmod(start, self.block_size)
        last = blocks[row * self.num_groups : (row + 1) * self.num_groups] if rest else []  # partly filled
        copied = any(block.ref_count > 1 for block in last)
        if missing + copied * self.num_groups > self.pool.num_free:
            return None
        if copied:
            new = self._allocate(missing + self.num_groups)
            self.pool.free(last)
            blocks[-self.num_groups :] = new
            return Room(_ids(new), self.num_groups, list(zip(_ids(last), _ids(new), strict=False)))
        for block in last:
            self.index.remove(block)  # its name is from one who had filled it and is gone
        if missing <= 0:
            return NO_ROOM_NEEDED
        new = self._allocate(missing)
        blocks += new
        return Room(_ids(new))

    def take_moves(self, step_id: int) -> list[KVMove]:
        """See ``KVCacheManager.take_moves``."""
        return self.tiers.take_moves(step_id)

    def swap_out(self, request: Request, copies: Sequence[tuple[int, int]] = ()) -> None:
        """As ``KVCacheManager.swap_out``; all that the next token sees, or nothing."""
        num_tokens, blocks = request.num_confirmed_tokens, self._tables[request.request_id].blocks
        keys, first = block_keys(request, num_tokens, self.block_size), self._first_rows(num_tokens)
        seen = [(row, group) for row in range(len(keys)) for group in range(self.num_groups) if row >= first[group]]
        held = [blocks[row * self.num_groups + group] for row, group in seen]
        if self._null not in held:  # a load that has not come back was for a later token, which sees less
            names = [block_key(keys[row], group) for row, group in seen]
            self.tiers.swap_out(request, Swap(names, num_tokens), _ids(held), copies, whole=True)

    def spoil(self, spoiled: Mapping[int, str]) -> set[str]:
        """See ``KVCacheManager.spoil``."""
        for block_id in spoiled:
            self.index.remove(self.pool.blocks[block_id])
        return self.tiers.misled(spoiled, {key: self._real(table.blocks) for key, table in self._tables.items()})

    def _allocate(self, count: int) -> list[Block]:
        blocks = self.pool.allocate(count)
        self.tiers.reused(blocks)
        return blocks

    def _drop(self, table: _Table, num_tokens: int) -> None:
        """Give back what no token from ``num_tokens`` on sees. No step that fills it may still be in flight."""
        dropped = []
        for group, row in enumerate(self._first_rows(num_tokens)):
            for i in range(table.first[group], row):
                entry = i * self.num_groups + group
                dropped.append(table.blocks[entry])
                table.blocks[entry] = self._null
            table.first[group] = max(row, table.first[group])
        self.pool.free(dropped)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Give ``child`` a table: the blocks of the first ``num_tokens`` (computed) tokens of ``parent``, shared.

        Raises InvariantError if the parent has given back some that the child's next token sees.
        """
        source = self._tables[parent.request_id]
        if any(held > wanted for held, wanted in zip(source.first, self._first_rows(num_tokens))):
            raise InvariantError(f"{parent.request_id} no longer has what follows its first {num_tokens} tokens")
        blocks = source.blocks[: self._num_entries(num_tokens)]
        num_named = min(source.num_named, num_tokens // self.block_size)
        self._tables[child.request_id] = _Table(blocks, list(source.first), num_named, private=source.private)
        self.pool.acquire(self._real(blocks))

    def reclaim(self, request: Request, others: Iterable[Request]) -> bool:
        """See ``KVCacheManager.reclaim``."""
        running = RequestStatus.RUNNING
        holders = [one for one in others if one.status is not running and one.holds_blocks and one is not request]
        if not self.can_gain(request, holders):
            return False
        self.swap_out(holders[-1])
        self.free(holders[-1])
        holders[-1].hold(0)
        return True

    def can_gain(self, request: Request, holders: Sequence[Request]) -> bool:
        """See ``KVCacheManager.can_gain``."""
        held = self._held(holders)
        if any(self.pool.blocks[block_id].ref_count == count for block_id, count in held.items()):
            return True
        own = self._tables.get(request.request_id)
        last = own.blocks[-self.num_groups :] if own is not None else []
        shared = [block for block in last if block.ref_count > 1]
        return bool(shared) and all(block.ref_count == held[block.block_id] + 1 for block in shared)

    def would_fit(self, request: Request, holders: Sequence[Request], *, reserved: int = 0) -> bool:
        """See ``KVCacheManager.would_fit``."""
        held, own = self._held(holders), self._tables.get(request.request_id)
        prefix = self.find_prefix(request)
        free = self.pool.num_free + sum(self.pool.blocks[i].ref_count == count for i, count in held.items())
        if own is not None:
            last = own.blocks[-self.num_groups :] if request.num_computed_tokens % self.block_size else []
            copies = self.num_groups * any(block.ref_count > 1 for block in last)
            return self._num_lacking(own, request.num_tokens) + copies <= free
        shared = self._real(prefix.blocks)
        taken = sum(block.ref_count == held[block.block_id] for block in shared)
        return self._most_blocks(prefix.num_tokens, request.num_tokens) - len(shared) <= free - taken - reserved

    def share(self, request: Request) -> None:
        """See ``KVCacheManager.share``."""
        table = self._tables[request.request_id]
        in_passes = request.sampling_params.wants_prompt_logprobs
        filled = request.num_confirmed_tokens if in_passes else request.num_computed_tokens
        full = min(filled, request.num_tokens) // self.block_size
        self._offer(request, table)
        if full <= table.num_named or table.private or not self.enable_prefix_caching:
            return
        new = table.blocks[table.num_named * self.num_groups : full * self.num_groups]
        fresh = [block for block in new if not block.is_cached and block is not self._null]
        self.index.insert(request, table.blocks, full * self.block_size, first=table.num_named)
        for block in fresh:
            self.tiers.fills(block, request)
        table.num_named = full

    def _offer(self, request: Request, table: _Table) -> None:
        """Tell the tiers of blocks that have a name, and whose step has come back."""
        end = min(request.num_confirmed_tokens // self.block_size, table.num_named)
        for row in range(table.num_offered, end):
            for group in range(self.num_groups):
                block = table.blocks[row * self.num_groups + group]
                if block is not self._null:
                    self.tiers.chain.filled(block_key(request.block_hashes[row], group), block.block_id)
        table.num_offered = max(table.num_offered, end)

    def sharers(self, request: Request, first_token: int) -> set[str]:
        """Ids of the other requests whose tables hold blocks of ``request`` from ``first_token``'s row on."""
        row = first_token // self.block_size
        blocks = self._tables[request.request_id].blocks[row * self.num_groups :]
        shared = {block.block_id for block in self._real(blocks) if block.ref_count > 1}
        if not shared:
            return set()
        holders = {key for key, table in self._tables.items() if any(b.block_id in shared for b in table.blocks)}
        return holders - {request.request_id}

    def free(self, request: Request, *, spoiled: bool = False) -> None:
        """See ``KVCacheManager.free``. Blocks given back before keep their names: their steps were sound."""
        table = self._tables.pop(request.request_id)
        if spoiled:
            groups = range(self.num_groups)
            self.tiers.chain.forget([block_key(key, group) for key in request.block_hashes for group in groups])
        else:
            self._offer(request, table)
        num_sound = 0 if spoiled else request.num_confirmed_tokens // self.block_size
        for block in table.blocks[num_sound * self.num_groups : table.num_named * self.num_groups]:
            self.index.remove(block)
        self.pool.free(self._real(reversed(table.blocks)))

    def block_ids(self, request: Request) -> list[int]:
        """The request's flat table; 0 for what was given back."""
        return _ids(self._tables[request.request_id].blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all shared prefixes; running requests keep their blocks but offer them to nobody any more."""
        self.index.clear()
        self.tiers.clear()
        for table in self._tables.values():
            table.private = True

    def check_invariants(self, holders: Sequence[Request]) -> None:
        """Tables belong to exactly the ``holders`` and hold what their next tokens see; the pool is sound."""
        if self._tables.keys() != {request.request_id for request in holders}:
            raise InvariantError(f"block tables of {sorted(self._tables)}, not of {[r.request_id for r in holders]}")
        references = self._held(holders)
        references.update(block.block_id for block in self.cache.pins.held)
        self.pool.check_invariants(references)
        for request in holders:
            table, computed = self._tables[request.request_id], request.num_computed_tokens
            if len(table.blocks) != self._num_entries(wanted := request.num_covered_tokens):
                raise InvariantError(f"{request.request_id} has {len(table.blocks)} entries for {wanted} tokens")
            if any(held > wanted for held, wanted in zip(table.first, self._first_rows(computed))):
                raise InvariantError(f"{request.request_id} gave back what its next token sees: {table.first}")
            for entry, block in enumerate(table.blocks):
                row, group = divmod(entry, self.num_groups)
                if (block is self._null) != (row < table.first[group]):
                    raise InvariantError(f"{request.request_id}: {block} in row {row} of group {group}")

    def _held(self, holders: Sequence[Request]) -> Counter[int]:
        return Counter(block.block_id for one in holders for block in self._real(self._tables[one.request_id].blocks))

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """See ``KVCacheManager.keys``."""
        first = self._first_rows(len(hashes) * self.block_size)
        rows = enumerate(hashes)
        return [
            block_key(row_hash, group) for row, row_hash in rows for group, start in enumerate(first) if row >= start
        ]

    def adopt(self, request: Request, blocks: Mapping[bytes, Block]) -> None:
        """See ``KVCacheManager.adopt``."""
        hashes, groups = request.hashes(self.block_size), range(self.num_groups)
        table = [blocks.get(block_key(row_hash, group), self._null) for row_hash in hashes for group in groups]
        self.index.insert(request, table, len(hashes) * self.block_size)

    def _real(self, blocks: Iterable[Block]) -> list[Block]:
        return [block for block in blocks if block is not self._null]

    def _num_entries(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.num_groups

    def _first_rows(self, num_tokens: int) -> list[int]:
        """Of each group, the first row that a token at position ``num_tokens`` sees."""
        return [0 if w is None else max(0, num_tokens - w + 1) // self.block_size for w in self._windows]


KVManager = KVCacheManager | GroupedKVCacheManager


def make_manager(
    num_blocks: int,
    block_size: int,
    specs: Sequence[KVSpec],
    tiers: TierChain | None = None,
    *,
    prefix_index: str = "hash",
    ahead: int = 1,
    **options: Any,
) -> KVManager:
    """The manager of a model with groups of these ``specs``; ``options`` are those of its class.

    ``ahead``: most tokens of a sequence that are planned before the first of them has come back.

    With windows, prefixes are found by hashes, whatever ``prefix_index`` says.
    """
    if [spec.kind for spec in specs] == ["full"]:
        return KVCacheManager(num_blocks, block_size, tiers, prefix_index=prefix_index, **options)
    return GroupedKVCacheManager(num_blocks, block_size, specs, tiers, ahead=ahead, **options)


def _ids(blocks: Iterable[Block]) -> list[int]:
    return [block.block_id for block in blocks]
