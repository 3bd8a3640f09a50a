"""What the /v1/cache routes send. Times are seconds since the epoch."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix in the block pool: where nothing cached goes on, where cached sequences part, or what is pinned.

    ``hits``: requests that took over at least these blocks. ``preview``: its first and last tokens as text, where asked
    for; null if a ``cache_salt`` keeps it apart.
    """

    id: str
    object: str = "cache.prefix"
    tokens: int
    blocks: int
    blocks_in_use: int
    hits: int
    last_used: float
    salted: bool
    pins: list[str]
    preview: str | UnsetType | None = UNSET


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks_held`` of its ``blocks`` have been computed, and stay. ``tenant``: whose request set it by
    ``cache_control``; null if an administrator did.
    """

    id: str
    object: str = "cache.pin"
    prefix_id: str
    tokens: int
    blocks: int
    blocks_held: int
    tenant: str | None
    expires_at: float


class PinRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """The pin is gone."""

    id: str
    object: str = "cache.pin.deleted"
    deleted: bool = True


class PrefixCache(msgspec.Struct, frozen=True, kw_only=True):
    """The prefixes, most recently used first, and all pins. ``prefixes_total`` counts those that are not listed too."""

    object: str = "cache"
    block_size: int
    blocks_cached: int
    blocks_pinned: int
    blocks_pinned_max: int
    prefixes_total: int
    prefixes: list[CachedPrefix]
    pins: list[Pin]


class BlocksChanged(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks were evicted, are being saved, or are being restored."""

    object: str
    blocks: int
