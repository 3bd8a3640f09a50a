"""What scheduler and worker tell each other about KV tiers: memory behind the block pool that keeps whole blocks."""

from __future__ import annotations

from typing import Literal

import msgspec


class KVMove(msgspec.Struct, frozen=True, array_like=True):
    """One block on its way between the pool and a tier. ``key`` names its contents, as a block's hash does.

    store: block ``block_id`` goes to the tier; load: it comes from there; drop: the tier forgets the key. ``slot`` is
    the place in a tier that has places.
    """

    tier: str
    kind: Literal["store", "load", "drop"]
    key: bytes
    block_id: int = 0
    slot: int = 0


class KVTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier moved: whole blocks and the seconds that the step waited for them."""

    blocks_loaded: int = 0
    load_seconds: float = 0.0
    bytes_loaded: int = 0
    bytes_stored: int = 0


class KVTierReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of moves to and from one tier since the last report. Stores of a tier may end steps later.

    ``failed``: loads, as (key, block id), that left anything in their blocks; ``kept`` and ``lost``: ends of stores.
    """

    failed: list[tuple[bytes, int]] = []
    kept: list[bytes] = []
    lost: list[bytes] = []
    traffic: KVTraffic = KVTraffic()


class KVTierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tier as it was opened: room for ``capacity`` blocks, and the ``keys`` it holds, least recently used first.

    One that is not ``writable`` takes no stores.
    """

    capacity: int
    block_bytes: int
    keys: list[bytes] = []
    writable: bool = True


class KVTierStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tier in numbers: blocks held / capacity, 0..1; bytes moved since the previous message."""

    usage: float = 0.0
    loaded_bytes_delta: int = 0
    stored_bytes_delta: int = 0
