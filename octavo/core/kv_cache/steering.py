"""Steering: what an administrator, or a request, may have done with cached prefixes.

Sits beside a block manager, which tells it of every name that is given or taken: it keeps the book of prefixes and the
pins, and carries out orders between two steps. Knows no block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.core.family import SOLO
from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.event_log import EventLog, NullEventLog
from octavo.core.kv_cache.pins import Pin, PinLimits, PinTable
from octavo.core.kv_cache.prefix_book import HASH_BYTES, CachedPrefix, PrefixBook
from octavo.core.kv_cache.tier_link import TierLink
from octavo.core.request import Request
from octavo.exceptions import InvariantError, ValidationError
from octavo.messages import (
    CacheMiss,
    CacheOrder,
    CacheReply,
    EngineCoreRequest,
    EvictPrefixes,
    ListPrefixes,
    PinInfo,
    PrefixInfo,
    RemovePin,
    RequestFault,
    ResetCache,
    RestorePrefix,
    SamplingParams,
    SavePrefixes,
    SetPin,
)

Names = Callable[[Sequence[bytes]], Sequence[bytes]]
"""From the hashes of a prefix's rows to the names of the blocks that its next token needs."""

Adopt = Callable[[Request, Mapping[bytes, Block]], None]
"""Puts blocks with these names, of a leading part of a request's rows, into the index."""

NOT_FOUND = CacheReply(found=False)


class Steering:
    """``names``, ``adopt`` and ``reset`` (forget all) are the manager's; ``clock`` gives seconds."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: TierLink,
        names: Names,
        adopt: Adopt,
        reset: Callable[[], None],
        *,
        block_size: int,
        limits: PinLimits,
        clock: Callable[[], float],
        events: EventLog | NullEventLog,
    ) -> None:
        self.book = PrefixBook(block_size, clock)
        self.events = events
        self.pins = PinTable(pool, limits, self.book.block)
        self._pool, self._tiers, self._names, self._adopt, self._reset = pool, tiers, names, adopt, reset
        self._block_size, self._clock = block_size, clock

    # ---- heard from the manager

    def named(self, name: bytes, block: Block, request: Request, index: int) -> None:
        """``block`` can be found by others from now on, under ``name``, as the ``index``-th row of ``request``."""
        self.events.stored(name, self.book.named(name, block, request, index))
        self.pins.named(name, block)

    def unnamed(self, block: Block) -> None:
        """``block`` can no longer be found."""
        name = self.book.unnamed(block)
        self.events.removed(name)
        self.pins.unnamed(name)

    def clear(self) -> None:
        """All names are about to be taken."""
        self.pins.clear()
        self.book.clear()
        self.events.cleared()

    # ---- for requests

    def expire(self) -> None:
        """Let go of the pins whose time is over."""
        self.pins.expire(self._clock())

    @property
    def seconds_to_expiry(self) -> float | None:
        """No pin's time is over sooner; at least 0. None if there are no pins."""
        first = self.pins.next_expiry
        return None if first is None else max(0.0, first - self._clock())

    def pin(self, request: Request) -> None:
        """Set the pins that ``request`` wishes, as far as they fit; notes on it up to which token they do."""
        self.expire()
        for wish in request.source.cache_pins:
            hashes = request.hashes(self._block_size)[: wish.num_tokens // self._block_size]
            try:
                if hashes:
                    self._pin(hashes, request.source.tenant.name, wish.ttl)
            except ValidationError:
                break
            request.num_pinned_tokens = len(hashes) * self._block_size

    def explain(self, request: Request, num_found: int | None) -> CacheMiss:
        """Why no more than ``num_found`` tokens of ``request`` were found; None: nobody looked."""
        return CacheMiss("off", 0, 0) if num_found is None else self.book.explain(request, num_found)

    def _pin(self, hashes: Sequence[bytes], tenant: str | None, ttl: float) -> Pin:
        """Raises ValidationError if there is no room for the pin."""
        num_tokens, expires = len(hashes) * self._block_size, self._clock() + ttl
        return self.pins.add(hashes[-1], num_tokens, self._names(hashes), tenant, expires)

    # ---- orders

    def carry_out(self, order: CacheOrder) -> CacheReply:
        """Never raises what is the order's fault: that is the reply's ``fault``."""
        self.expire()
        try:
            return self._carry_out(order)
        except ValidationError as error:
            return CacheReply(fault=RequestFault.of(error, "steering the cache"))

    def _carry_out(self, order: CacheOrder) -> CacheReply:
        match order:
            case ListPrefixes():
                return self._list(order)
            case SetPin():
                return self._set_pin(order)
            case RemovePin():
                return CacheReply(found=self.pins.remove(order.pin_id))
            case EvictPrefixes():
                return self._evict(order.prefix)
            case SavePrefixes():
                return self._save(order.prefix)
            case RestorePrefix():
                return self._restore(order)
            case ResetCache():
                self._reset()
                return CacheReply()

    def _list(self, order: ListPrefixes) -> CacheReply:
        pins = self.pins.pins
        marks: dict[bytes, list[str]] = {}
        for pin in pins:
            marks.setdefault(pin.prefix, []).append(pin.pin_id)
        prefixes = self.book.prefixes(marks)
        now = self._clock()
        return CacheReply(
            prefixes=[self._describe(one, marks, order.num_preview_tokens, now) for one in prefixes[: order.limit]],
            num_prefixes=len(prefixes),
            pins=[self._describe_pin(pin, now) for pin in pins],
            num_cached_blocks=len(self._pool.index),
            num_pinned_blocks=self.pins.num_blocks,
            max_pinned_blocks=self.pins.limits.blocks,
        )

    def _describe(
        self, prefix: CachedPrefix, marks: dict[bytes, list[str]], num_preview_tokens: int, now: float
    ) -> PrefixInfo:
        last = prefix.last
        rows = self.book.path(last.row_hash)
        blocks = [block for row in rows for block in row.blocks.values()]
        shown = 0 if last.salt is not None else num_preview_tokens
        tokens = [token_id for row in rows for token_id in row.token_ids] if shown else []
        return PrefixInfo(
            prefix=last.row_hash,
            num_tokens=last.num_tokens,
            num_blocks=len(blocks),
            num_used_blocks=sum(block.ref_count > 0 for block in blocks),
            hits=prefix.hits,
            idle=now - prefix.last_used,
            salted=last.salt is not None,
            pin_ids=marks.get(last.row_hash, []),
            head=tokens[:shown],
            tail=tokens[max(shown, len(tokens) - shown) :],
        )

    def _describe_pin(self, pin: Pin, now: float) -> PinInfo:
        return PinInfo(
            pin_id=pin.pin_id,
            prefix=pin.prefix,
            num_tokens=pin.num_tokens,
            num_blocks=len(pin.names),
            num_held=self.pins.num_held(pin),
            tenant=pin.tenant,
            expires_in=pin.expires - now,
        )

    def _set_pin(self, order: SetPin) -> CacheReply:
        if order.prefix is None:
            request = _prompt(order.prompt_token_ids, order.cache_salt)
            hashes = request.hashes(self._block_size)
            if not hashes:
                raise ValidationError(
                    f"the prompt has {request.num_tokens} tokens; less than {self._block_size}, a block, cannot be "
                    "pinned",
                    parameter="prompt",
                )
        else:
            hashes = [row.row_hash for row in self.book.path(order.prefix)]
            if not hashes:
                return NOT_FOUND
        pin = self._pin(hashes, None, order.ttl)
        return CacheReply(pins=[self._describe_pin(pin, self._clock())])

    def _evict(self, prefix: bytes | None) -> CacheReply:
        """Tiers forget it too. What is in use, or pinned, stays."""
        blocks: Sequence[Block] = self._pool.blocks
        if prefix is not None:
            blocks = [block for row in self.book.branch(prefix) for block in row.blocks.values()]
            if not blocks:
                return NOT_FOUND
        free = [block for block in blocks if block.is_cached and block.ref_count == 0]
        self._tiers.chain.forget([block.block_hash for block in free if block.block_hash is not None])
        for block in free:
            self._pool.index.remove(block)
            self._pool.discard(block)
        return CacheReply(num_blocks=len(free))

    def _save(self, prefix: bytes | None) -> CacheReply:
        if not self._tiers.chain.has_tier("disk"):
            raise ValidationError(
                "nothing here keeps KV blocks beyond the life of the process; start the server with --kv-cache-dir",
                parameter="prefix_id",
            )
        rows = self.book.rows() if prefix is None else self.book.path(prefix)
        if prefix is not None and not rows:
            return NOT_FOUND
        named = [pair for row in rows for pair in row.blocks.items() if not self._tiers.is_filling(pair[1].block_id)]
        for name, block in named:
            self._tiers.chain.filled(name, block.block_id)
        return CacheReply(num_blocks=len(named))

    def _restore(self, order: RestorePrefix) -> CacheReply:
        """Load what is missing of the longest prefix that tiers have, if the pool has so much free."""
        chain = self._tiers.chain
        if not chain:
            raise ValidationError(
                "nothing here keeps KV blocks outside the pool; start the server with --kv-cache-dir or --swap-space",
                parameter="prompt",
            )
        request = _prompt(order.prompt_token_ids, order.cache_salt)
        names = self._obtainable(request)
        here = {name: block for name in names if (block := self.book.block(name)) is not None}
        keys = [name for name in names if name not in here]
        self._pool.acquire(here.values())
        if len(keys) > self._pool.num_free:
            keys = []
        chain.pin(keys)  # what is evicted now goes to a tier, and must not push them out
        blocks = self._pool.allocate(len(keys))
        self._tiers.reused(blocks)
        for key, block in zip(keys, blocks, strict=True):
            chain.load(key, block.block_id)
            self._tiers.fills(block, request)
        found = here | dict(zip(keys, blocks, strict=True))
        held = {name: found[name] for name in names if name in found}  # in order
        self._adopt(request, held)
        chain.release(keys)
        self._pool.free(reversed(held.values()))
        return CacheReply(num_blocks=len(blocks))

    def _obtainable(self, request: Request) -> Sequence[bytes]:
        """Names of the blocks of the longest prefix of ``request`` of which each is in the pool or in a tier."""
        hashes = request.hashes(self._block_size)
        rows = {row_hash: index for index, row_hash in enumerate(hashes)}
        while hashes:
            names = self._names(hashes)
            has = self._tiers.chain.has
            missing = (name for name in names if self.book.block(name) is None and not has(name))
            first = next(missing, None)
            if first is None:
                return names
            hashes = hashes[: rows[first[:HASH_BYTES]]]  # a longer one needs that block too
        return ()

    def check_invariants(self) -> None:
        """The book knows exactly the named blocks. Raises InvariantError."""
        named = {block.block_id for block in self._pool.blocks if block.block_hash is not None}
        known = sorted(block.block_id for row in self.book.rows() for block in row.blocks.values())
        if known != sorted(named):
            raise InvariantError(f"the blocks {sorted(named)} have names, and the book of prefixes knows {known}")


def _prompt(token_ids: Sequence[int], salt: str | None) -> Request:
    """A request that is never run: its hashes are wanted."""
    source = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        cache_salt=salt,
    )
    return Request(source, SOLO, limit=0, queued_time=0.0)
