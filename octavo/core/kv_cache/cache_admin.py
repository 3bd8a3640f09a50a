"""CacheAdmin: what an administrator may ask about cached prefixes, or have done with them, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.family import SOLO
from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.groups import KVManager
from octavo.core.kv_cache.names import HASH_BYTES
from octavo.core.kv_cache.pins import PinnedPrefix
from octavo.core.kv_cache.prefix_tree import PrefixTree, PrefixUse, Row, blocks_of
from octavo.core.request import Request
from octavo.exceptions import ValidationError
from octavo.messages import (
    CacheOptions,
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

NOT_FOUND = CacheReply(found=False)


def pin_prefix(kv: KVManager, hashes: Sequence[bytes], tenant: str | None, ttl: float) -> PinnedPrefix:
    """Pin the rows of these hashes. Raises ValidationError if there is no room for the pin."""
    return kv.cache.pins.add(hashes[-1], len(hashes) * kv.block_size, kv.keys(hashes), tenant, ttl)


def pin_wishes(kv: KVManager, request: Request) -> None:
    """Set the pins that ``request`` wishes, as far as they fit; note in it up to which token they do."""
    kv.cache.pins.expire()
    for wish in request.source.cache.pins:
        hashes = request.hashes(kv.block_size)[: wish.num_tokens // kv.block_size]
        try:
            if hashes:
                pin_prefix(kv, hashes, request.source.scheduling.tenant.name, wish.ttl)
        except ValidationError:
            break
        request.note_cache(num_pinned_tokens=len(hashes) * kv.block_size)


class CacheAdmin:
    """``clock`` gives seconds."""

    def __init__(self, kv: KVManager, clock: Callable[[], float]) -> None:
        self._kv, self._clock = kv, clock
        self._pool, self._tiers, self._pins = kv.pool, kv.tiers, kv.cache.pins

    def _tree(self) -> PrefixTree:
        return PrefixTree(self._pool.index.names.entries())

    def carry_out(self, order: CacheOrder) -> CacheReply:
        """Never raises what is the order's fault: that is the reply's ``fault``."""
        self._pins.expire()
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
                return CacheReply(found=self._pins.remove(order.pin_id))
            case EvictPrefixes():
                return self._evict(order.prefix)
            case SavePrefixes():
                return self._save(order.prefix)
            case RestorePrefix():
                return self._restore(order)
            case ResetCache():
                self._kv.reset_prefix_cache()
                return CacheReply()

    def _list(self, order: ListPrefixes) -> CacheReply:
        pins = self._pins.pins
        marks: dict[bytes, list[str]] = {}
        for pin in pins:
            marks.setdefault(pin.prefix, []).append(pin.pin_id)
        tree = self._tree()
        prefixes = tree.prefixes(marks)
        now = self._clock()
        return CacheReply(
            prefixes=[
                self._describe(tree.path(one.last.row_hash), one, marks, order.num_preview_tokens, now)
                for one in prefixes[: order.limit]
            ],
            num_prefixes=len(prefixes),
            pins=[self._describe_pin(pin, now) for pin in pins],
            num_cached_blocks=len(self._pool.index),
            num_pinned_blocks=self._pins.num_blocks,
            max_pinned_blocks=self._pins.limits.blocks,
        )

    def _describe(
        self, rows: Sequence[Row], prefix: PrefixUse, marks: dict[bytes, list[str]], num_preview_tokens: int, now: float
    ) -> PrefixInfo:
        last = prefix.last
        blocks = blocks_of(rows)
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

    def _describe_pin(self, pin: PinnedPrefix, now: float) -> PinInfo:
        return PinInfo(
            pin_id=pin.pin_id,
            prefix=pin.prefix,
            num_tokens=pin.num_tokens,
            num_blocks=len(pin.keys),
            num_held=self._pins.num_held(pin),
            tenant=pin.tenant,
            expires_in=pin.expires - now,
        )

    def _set_pin(self, order: SetPin) -> CacheReply:
        if order.prefix is None:
            request = _prompt(order.prompt_token_ids, order.cache_salt)
            hashes = request.hashes(self._kv.block_size)
            if not hashes:
                raise ValidationError(
                    f"the prompt has {request.num_tokens} tokens; less than {self._kv.block_size}, a block, cannot be "
                    "pinned",
                    parameter="prompt",
                )
        else:
            hashes = [row.row_hash for row in self._tree().path(order.prefix)]
            if not hashes:
                return NOT_FOUND
        pin = pin_prefix(self._kv, hashes, None, order.ttl)
        return CacheReply(pins=[self._describe_pin(pin, self._clock())])

    def _evict(self, prefix: bytes | None) -> CacheReply:
        """Tiers forget it too. What is in use, or pinned, stays."""
        blocks: Sequence[Block] = self._pool.blocks
        if prefix is not None:
            blocks = blocks_of(self._tree().branch(prefix))
            if not blocks:
                return NOT_FOUND
        free = [block for block in blocks if block.is_cached and block.ref_count == 0]
        self._tiers.chain.forget([block.key for block in free if block.key is not None])
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
        tree = self._tree()
        rows = list(tree.rows.values()) if prefix is None else tree.path(prefix)
        if prefix is not None and not rows:
            return NOT_FOUND
        entries = [one for row in rows for one in row.entries if not self._tiers.is_filling(one.block.block_id)]
        for entry in entries:
            self._tiers.chain.filled(entry.key, entry.block.block_id)
        return CacheReply(num_blocks=len(entries))

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
        cached = self._pool.index.names.blocks
        here = {name: cached[name] for name in names if name in cached}
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
        self._kv.adopt(request, held)
        chain.release(keys)
        self._pool.free(reversed(held.values()))
        return CacheReply(num_blocks=len(blocks))

    def _obtainable(self, request: Request) -> Sequence[bytes]:
        """Names of the blocks of the longest prefix of ``request`` of which each is in the pool or in a tier."""
        hashes = request.hashes(self._kv.block_size)
        rows = {row_hash: index for index, row_hash in enumerate(hashes)}
        while hashes:
            names = self._kv.keys(hashes)
            cached, has = self._pool.index.names.blocks, self._tiers.chain.has
            missing = (name for name in names if name not in cached and not has(name))
            first = next(missing, None)
            if first is None:
                return names
            hashes = hashes[: rows[first[:HASH_BYTES]]]  # a longer one needs that block too
        return ()


def _prompt(token_ids: Sequence[int], salt: str | None) -> Request:
    """A request that is never run: its hashes are wanted."""
    source = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        cache=CacheOptions(salt=salt),
    )
    return Request(source, SOLO, limit=0, queued_time=0.0)
