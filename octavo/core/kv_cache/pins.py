"""PinTable: cached blocks that must stay. A pin is a reference, so that the pool never counts its blocks as free.

A pin is on the *keys* of a prefix's blocks: it holds those blocks that are cached, and each other one as soon as it is
computed. Blocks that several pins want are held once. Knows nothing of tokens or requests.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.core.kv_cache.names import CacheEntry
from octavo.exceptions import ValidationError
from octavo.messages import PinInfo, new_pin_id


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Most blocks that all pins together, and those of one tenant, may want."""

    blocks: int
    tenant_blocks: int


NO_PINS = PinLimits(0, 0)


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """``prefix``: the hash of the last block. ``tenant``: whose request set it; None: an administrator."""

    pin_id: str
    prefix: bytes
    num_tokens: int
    keys: Sequence[bytes]
    tenant: str | None
    expires: float


class PinTable:
    """An observer of the pool's index. ``clock`` gives seconds."""

    def __init__(self, pool: BlockPool, limits: PinLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._pool, self._clock = pool, clock
        self._pins: dict[str, PinnedPrefix] = {}
        self._by_prefix: dict[tuple[bytes, str | None], PinnedPrefix] = {}  # and tenant
        self._wanted: Counter[bytes] = Counter()  # by key, the number of pins
        self._held: dict[bytes, Block] = {}
        self._tenants: dict[str, Counter[bytes]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap; a pin may have been renewed since, or be gone

    @property
    def pins(self) -> list[PinnedPrefix]:
        """All pins, in the order in which they were set."""
        return list(self._pins.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that pins want, cached or not."""
        return len(self._wanted)

    @property
    def held(self) -> list[Block]:
        """Blocks that have a reference from here."""
        return list(self._held.values())

    @property
    def usage(self) -> float:
        """Blocks that pins hold / usable blocks, 0..1."""
        return len(self._held) / self._pool.num_usable

    @property
    def seconds_to_expiry(self) -> float | None:
        """No pin ends sooner by itself; at least 0. None if there are no pins."""
        return max(0.0, self._expiries[0][0] - self._clock()) if self._expiries else None

    def describe(self, pin: PinnedPrefix) -> PinInfo:
        """What an administrator is told of ``pin``."""
        return PinInfo(
            pin_id=pin.pin_id,
            prefix=pin.prefix,
            num_tokens=pin.num_tokens,
            num_blocks=len(pin.keys),
            num_held=sum(key in self._held for key in pin.keys),
            tenant=pin.tenant,
            expires_in=pin.expires - self._clock(),
        )

    def check(self, keys: Sequence[bytes], tenant: str | None) -> None:
        """Raises ValidationError, with the numbers, if a pin on ``keys`` would pass a limit."""
        total = self.num_blocks + sum(key not in self._wanted for key in keys)
        if total > self.limits.blocks:
            raise ValidationError(
                f"with this pin {total} blocks would be pinned, and at most {self.limits.blocks} may be: that is "
                "max_pinned_share of the pool, as far as a request of max_model_len tokens still fits beside them",
                value=total,
            )
        if tenant is not None:
            own = self._tenants.get(tenant, Counter())
            total = len(own) + sum(key not in own for key in keys)
            if total > self.limits.tenant_blocks:
                raise ValidationError(
                    f"with this pin {total} blocks would be pinned by one tenant, and at most "
                    f"{self.limits.tenant_blocks} may be (max_tenant_pinned_share)",
                    value=total,
                )

    def add(
        self, prefix: bytes, num_tokens: int, keys: Sequence[bytes], tenant: str | None, ttl: float, pin_id: str = ""
    ) -> PinnedPrefix:
        """Pin ``keys`` for ``ttl`` seconds, or renew the tenant's pin on the prefix, which then lasts at least as long.

        A new pin gets ``pin_id``, or else a name of its own.

        Raises ValidationError, see :meth:`check`.
        """
        expires = self._clock() + ttl
        known = self._by_prefix.get((prefix, tenant))
        if known is not None:
            known.expires = max(known.expires, expires)
            return known
        self.check(keys, tenant)
        pin = PinnedPrefix(pin_id or new_pin_id(), prefix, num_tokens, tuple(keys), tenant, expires)
        self._pins[pin.pin_id] = self._by_prefix[prefix, tenant] = pin
        heapq.heappush(self._expiries, (expires, pin.pin_id))
        if tenant is not None:
            self._tenants.setdefault(tenant, Counter()).update(pin.keys)
        cached = self._pool.index.names.blocks
        for key in pin.keys:
            self._wanted[key] += 1
            if key not in self._held and (block := cached.get(key)) is not None:
                self._hold(key, block)
        return pin

    def remove(self, pin_id: str) -> bool:
        """Let a pin go; False if there is none with this id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        del self._by_prefix[pin.prefix, pin.tenant]
        if pin.tenant is not None:
            own = self._tenants.pop(pin.tenant, Counter())  # none where all its pins are of less than a block
            own.subtract(pin.keys)
            if left := +own:
                self._tenants[pin.tenant] = left
        released = []
        for key in reversed(pin.keys):  # tail first, as the pool wants them
            self._wanted[key] -= 1
            if self._wanted[key] == 0:
                del self._wanted[key]
                if (block := self._held.pop(key, None)) is not None:
                    released.append(block)
        self._pool.free(released)
        return True

    def expire(self) -> None:
        """Let go of the pins whose time is over."""
        if not self._expiries:
            return
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, pin_id = heapq.heappop(self._expiries)
            pin = self._pins.get(pin_id)
            if pin is not None and pin.expires > now:
                heapq.heappush(self._expiries, (pin.expires, pin_id))
            elif pin is not None:
                self.remove(pin_id)

    # ---- heard from the names

    def named(self, entry: CacheEntry) -> None:
        """See ``CacheObserver``."""
        if entry.key in self._wanted:
            self._hold(entry.key, entry.block)

    def unnamed(self, entry: CacheEntry) -> None:
        """See ``CacheObserver``. What the block holds is wrong, or might be."""
        if entry.key in self._held:
            self._pool.free([self._held.pop(entry.key)])

    def cleared(self) -> None:
        """See ``CacheObserver``. All pins end."""
        for pin_id in list(self._pins):
            self.remove(pin_id)
        self._expiries.clear()

    def _hold(self, key: bytes, block: Block) -> None:
        self._pool.acquire([block])
        self._held[key] = block
