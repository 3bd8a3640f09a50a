"""What a request wishes of the prefix cache, and what it hears of it."""

from __future__ import annotations

from typing import Literal

import msgspec


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
