"""The two halves of a KV tier, as the rest of the engine sees them.

    scheduler                                          worker
    TierChain ── TierPlanner (which key, which place) ──KVMove──▶ TierMover (copies bytes)
              ◀───────────── what failed, what is kept ──KVTierReport──

A plan's moves run before anything else of its step, in the order in which they were planned. So a block may be stored
and then be overwritten by the same step; a place may be loaded from and then be stored to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.messages import KVMove, KVTierInfo, KVTierReport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    ByteArray = npt.NDArray[np.uint8]
else:
    ByteArray = Any

Emit = Callable[[KVMove], None]
"""Appends a move to the next plan."""


class TierPlanner(Protocol):
    """Which blocks a tier holds. Plain Python; every call is O(1)."""

    name: str
    capacity: int  # blocks

    def __len__(self) -> int:
        """Blocks that it holds or is about to hold."""
        ...

    def has(self, key: bytes) -> bool:
        """Can ``key`` be loaded by the next plan?"""
        ...

    def load(self, key: bytes, block_id: int) -> None:
        """Fill a block with what the tier :meth:`has`, and count that as a use."""
        ...

    def used(self, key: bytes) -> None:
        """``key`` was wanted and found in the pool: it counts as used here too, if it is here."""
        ...

    def filled(self, key: bytes, block_id: int) -> None:
        """A step that came back filled a block with ``key``; it is to be had until it is evicted."""
        ...

    def evicted(self, key: bytes, block_id: int) -> None:
        """The next plan overwrites a block with ``key``: the last chance to store it."""
        ...

    def hold(self, key: bytes, block_id: int) -> bool:
        """Keep a block, stored now if it is not here, until it is released. False if there is no room for it."""
        ...

    def pin(self, key: bytes) -> None:
        """Nothing may push ``key`` out until it is released."""
        ...

    def release(self, key: bytes) -> None:
        """Undo one :meth:`pin` or :meth:`hold`. Keys that are not here are ignored."""
        ...

    def forget(self, key: bytes) -> None:
        """What is kept under ``key`` is wrong, or might be. Keys that are not here are ignored."""
        ...

    def clear(self) -> None:
        """Forget all keys."""
        ...

    def void(self, keys: Iterable[bytes]) -> None:
        """Steps raised: which stores of ``keys`` were made is unknown, and reports of the worker may be lost."""
        ...

    def settle(self, report: KVTierReport) -> None:
        """Stores have ended."""
        ...


class BlockMemory(Protocol):
    """The pool's memory, as a backend lays it out."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        ...

    def read_blocks(self, block_ids: Sequence[int], out: ByteArray) -> None:
        """Copy whole blocks to ``out`` [N, block_bytes]."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        """Copy ``data`` [N, block_bytes] over whole blocks."""
        ...


class TierMover(Protocol):
    """Copies blocks of one tier. Never raises: what goes wrong is reported."""

    info: KVTierInfo

    def move(self, moves: Sequence[KVMove]) -> None:
        """Do ``moves``, all of one kind, in order. Loads and reads of the pool are done when it returns."""
        ...

    def report(self) -> KVTierReport:
        """What has come of moves since the last call."""
        ...

    def close(self) -> None:
        """Finish, within seconds, what was begun; nothing is asked for any more."""
        ...
