"""What an administrator tells the engine core to do with cached prefixes, and what the core says of them.

A prefix is named by the hash of its last block of tokens. Seconds are relative: clocks differ between processes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.messages.fault import RequestFault


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Why no more of a prompt was found than ``num_found`` tokens.

    ``complete``: all whole blocks that can be reused were. ``differs``: a cached prompt goes on otherwise from token
    ``position``. ``ends``: what is cached ends there. ``new``: nothing cached begins like it. ``off``: the request
    reads no cache.
    """

    kind: Literal["complete", "differs", "ends", "new", "off"]
    num_found: int
    position: int


class CachePin(msgspec.Struct, frozen=True, array_like=True):
    """A wish of a request: keep the first ``num_tokens`` tokens of its prompt for ``ttl`` seconds."""

    num_tokens: int
    ttl: float


class ListPrefixes(msgspec.Struct, frozen=True, tag=True):
    """At most ``limit``, with up to ``num_preview_tokens`` of the first and as many of the last tokens of each."""

    limit: int
    num_preview_tokens: int = 0


class SetPin(msgspec.Struct, frozen=True, tag=True):
    """Pin a prefix that is there, or the whole blocks of a prompt, for ``ttl`` seconds."""

    ttl: float
    prefix: bytes | None = None
    prompt_token_ids: list[int] = []
    cache_salt: str | None = None


class RemovePin(msgspec.Struct, frozen=True, tag=True):
    pin_id: str


class EvictPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget a prefix with all that follows it, or everything, except what is in use or pinned."""

    prefix: bytes | None = None


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Forget everything; pins end."""


class SavePrefixes(msgspec.Struct, frozen=True, tag=True):
    """Have the disk tier keep a prefix, or everything."""

    prefix: bytes | None = None


class RestorePrefix(msgspec.Struct, frozen=True, tag=True):
    """Load what tiers have of a prompt into the pool."""

    prompt_token_ids: list[int]
    cache_salt: str | None = None


CacheOrder = ListPrefixes | SetPin | RemovePin | EvictPrefixes | ResetCache | SavePrefixes | RestorePrefix


class PrefixInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix in the block pool. ``head`` and ``tail``: token ids for a preview, never of a salted prefix."""

    prefix: bytes
    num_tokens: int
    num_blocks: int
    num_used_blocks: int  # held by requests or pins
    hits: int  # requests that began with it and took over at least its blocks
    idle: float  # seconds since its last use
    salted: bool
    pin_ids: list[str]
    head: list[int] = []
    tail: list[int] = []


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A pin. ``num_held``: of its blocks, those that have been computed. ``tenant``: None if an administrator's."""

    pin_id: str
    prefix: bytes
    num_tokens: int
    num_blocks: int
    num_held: int
    tenant: str | None
    expires_in: float


class CacheReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of an order; only the fields that are about it are set.

    ``found``: what it names is there. ``num_blocks``: evicted, saved or restored.
    """

    found: bool = True
    fault: RequestFault | None = None
    num_blocks: int = 0
    pins: list[PinInfo] = []
    prefixes: list[PrefixInfo] = []
    num_prefixes: int = 0  # in all
    num_cached_blocks: int = 0
    num_pinned_blocks: int = 0
    max_pinned_blocks: int = 0
