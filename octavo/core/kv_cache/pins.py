"""PinTable: named blocks that must stay. A pin is a reference, so that the pool never counts its blocks as free.

A pin is on the *names* of a prefix's blocks: it holds those blocks that there are, and each other one as soon as it is
computed. Blocks that several pins name are held once. Knows nothing of tokens, hashes or requests.
"""

from __future__ import annotations

import heapq
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.exceptions import ValidationError


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Most blocks that all pins together, and those of one tenant, may name."""

    blocks: int
    tenant_blocks: int


NO_PINS = PinLimits(0, 0)


@dataclass(slots=True, eq=False)
class Pin:
    """``prefix``: the hash of the last block. ``tenant``: whose request set it; None: an administrator.

    No ``pin_id`` comes again: one of an engine core that has died must not name a pin of the next one.
    """

    pin_id: str
    prefix: bytes
    num_tokens: int
    names: Sequence[bytes]
    tenant: str | None
    expires: float  # on the clock of whoever calls


class PinTable:
    """``find`` gives the block that has a name now."""

    def __init__(self, pool: BlockPool, limits: PinLimits, find: Callable[[bytes], Block | None]) -> None:
        self.limits = limits
        self._pool, self._find = pool, find
        self._pins: dict[str, Pin] = {}
        self._by_prefix: dict[tuple[bytes, str | None], Pin] = {}  # and tenant
        self._wanted: Counter[bytes] = Counter()  # by name, the number of pins
        self._held: dict[bytes, Block] = {}
        self._tenants: dict[str, Counter[bytes]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap; a pin may have been renewed since, or be gone

    @property
    def pins(self) -> list[Pin]:
        """All pins, in the order in which they were set."""
        return list(self._pins.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that pins name, computed or not."""
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
    def next_expiry(self) -> float | None:
        """No pin ends sooner by itself; None if there are none."""
        return self._expiries[0][0] if self._expiries else None

    def num_held(self, pin: Pin) -> int:
        """How many of its blocks there are."""
        return sum(name in self._held for name in pin.names)

    def check(self, names: Sequence[bytes], tenant: str | None) -> None:
        """Raises ValidationError, with the numbers, if a pin on ``names`` would pass a limit."""
        total = self.num_blocks + sum(name not in self._wanted for name in names)
        if total > self.limits.blocks:
            raise ValidationError(
                f"with this pin {total} blocks would be pinned, and at most {self.limits.blocks} may be: that is "
                "max_pinned_share of the pool, as far as a request of max_model_len tokens still fits beside them",
                value=total,
            )
        if tenant is not None:
            own = self._tenants.get(tenant, Counter())
            total = len(own) + sum(name not in own for name in names)
            if total > self.limits.tenant_blocks:
                raise ValidationError(
                    f"with this pin {total} blocks would be pinned by one tenant, and at most "
                    f"{self.limits.tenant_blocks} may be (max_tenant_pinned_share)",
                    value=total,
                )

    def add(self, prefix: bytes, num_tokens: int, names: Sequence[bytes], tenant: str | None, expires: float) -> Pin:
        """Pin ``names``, or renew the tenant's pin on the same prefix, which then lasts at least as long.

        Raises ValidationError, see :meth:`check`.
        """
        known = self._by_prefix.get((prefix, tenant))
        if known is not None:
            known.expires = max(known.expires, expires)
            return known
        self.check(names, tenant)
        pin = Pin(f"pin-{secrets.token_hex(8)}", prefix, num_tokens, tuple(names), tenant, expires)
        self._pins[pin.pin_id] = self._by_prefix[prefix, tenant] = pin
        heapq.heappush(self._expiries, (expires, pin.pin_id))
        if tenant is not None:
            self._tenants.setdefault(tenant, Counter()).update(pin.names)
        for name in pin.names:
            self._wanted[name] += 1
            if name not in self._held and (block := self._find(name)) is not None:
                self._hold(name, block)
        return pin

    def remove(self, pin_id: str) -> bool:
        """Let a pin go; False if there is none with this id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        del self._by_prefix[pin.prefix, pin.tenant]
        if pin.tenant is not None:
            own = self._tenants.pop(pin.tenant, Counter())  # none where all its pins are of less than a block
            own.subtract(pin.names)
            if left := +own:
                self._tenants[pin.tenant] = left
        released = []
        for name in reversed(pin.names):  # tail first, as the pool wants them
            self._wanted[name] -= 1
            if self._wanted[name] == 0:
                del self._wanted[name]
                if (block := self._held.pop(name, None)) is not None:
                    released.append(block)
        self._pool.free(released)
        return True

    def expire(self, now: float) -> None:
        """Let go of the pins whose time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            _, pin_id = heapq.heappop(self._expiries)
            pin = self._pins.get(pin_id)
            if pin is not None and pin.expires > now:
                heapq.heappush(self._expiries, (pin.expires, pin_id))
            elif pin is not None:
                self.remove(pin_id)

    def clear(self) -> None:
        """Let go of all pins."""
        for pin_id in list(self._pins):
            self.remove(pin_id)
        self._expiries.clear()

    def named(self, name: bytes, block: Block) -> None:
        """``block`` can be found under ``name`` from now on."""
        if name in self._wanted:
            self._hold(name, block)

    def unnamed(self, name: bytes) -> None:
        """No block can be found under ``name`` any more: what it holds is wrong, or might be."""
        block = self._held.pop(name, None)
        if block is not None:
            self._pool.free([block])

    def _hold(self, name: bytes, block: Block) -> None:
        self._pool.acquire([block])
        self._held[name] = block
