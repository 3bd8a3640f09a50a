"""Pinning: from the rows of a prefix to a pin on the blocks that the token after them needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.kv_cache.pins import PinnedPrefix
from octavo.core.request import Request
from octavo.exceptions import ValidationError

if TYPE_CHECKING:
    from octavo.core.kv_cache.manager import KVCacheManager


def pin_prefix(
    kv: KVCacheManager, hashes: Sequence[bytes], tenant: str | None, ttl: float, pin_id: str = ""
) -> PinnedPrefix:
    """Pin the prefix whose rows have these hashes. Raises ValidationError if there is no room for the pin."""
    return kv.cache.pins.add(hashes[-1], len(hashes) * kv.block_size, kv.keys(hashes), tenant, ttl, pin_id)


def pin_wishes(kv: KVCacheManager, request: Request) -> None:
    """Set the pins that ``request`` wishes, as far as they fit, and note in it up to which token they do."""
    kv.cache.pins.expire()
    for wish in request.source.cache.pins:
        hashes = request.hashes(kv.block_size)[: wish.num_tokens // kv.block_size]
        try:
            if hashes:
                pin_prefix(kv, hashes, request.source.scheduling.tenant.name, wish.ttl)
        except ValidationError:
            break
        request.note(num_pinned_tokens=len(hashes) * kv.block_size)
