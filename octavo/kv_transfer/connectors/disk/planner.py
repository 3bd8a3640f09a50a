"""DiskTier: which blocks lie on disk, by key. Knows no files.

Blocks come as soon as they are filled, so that a killed process loses little; the least recently used go first. What
is being written cannot be loaded yet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from octavo.kv_transfer.base import Emit
from octavo.messages import KVMove, KVTierInfo, KVTierReport


class DiskTier:
    """See ``TierPlanner``."""

    name = "disk"

    def __init__(self, info: KVTierInfo, emit: Emit) -> None:
        self.capacity = info.capacity
        self._writable = info.writable
        self._emit = emit
        self._kept = OrderedDict.fromkeys(info.keys, True)  # least recently used first; False: being written
        self._pins: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, key: bytes) -> bool:
        return self._kept.get(key, False)

    def load(self, key: bytes, block_id: int) -> None:
        self._kept.move_to_end(key)
        self._emit(KVMove(self.name, "load", key, block_id))

    def used(self, key: bytes) -> None:
        if key in self._kept:
            self._kept.move_to_end(key)

    def filled(self, key: bytes, block_id: int) -> None:
        self._store(key, block_id)

    def evicted(self, key: bytes, block_id: int) -> None:
        """A second chance for what could not be written when it was filled."""
        self._store(key, block_id)

    def hold(self, key: bytes, block_id: int) -> bool:
        """No: a preempted request comes back soon, and memory is the place to wait."""
        return False

    def pin(self, key: bytes) -> None:
        self._pins[key] += 1

    def release(self, key: bytes) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    def forget(self, key: bytes) -> None:
        if self._kept.pop(key, None) is not None:
            self._emit(KVMove(self.name, "drop", key))

    def clear(self) -> None:
        for key in list(self._kept):
            self.forget(key)

    def void(self, keys: Iterable[bytes]) -> None:
        """Ends of stores may have been lost too: forget all that is not known to be there."""
        for key in [key for key, is_kept in self._kept.items() if not is_kept]:
            self.forget(key)

    def settle(self, report: KVTierReport) -> None:
        for key in report.kept:
            if key in self._kept:
                self._kept[key] = True
            else:  # forgotten, and given up for lost by an earlier store of it that was
                self._emit(KVMove(self.name, "drop", key))
        for key in report.lost:
            if self._kept.get(key) is False:
                del self._kept[key]

    def _store(self, key: bytes, block_id: int) -> None:
        if key in self._kept:
            self._kept.move_to_end(key)
        elif self._writable and self._make_room():
            self._kept[key] = False
            self._emit(KVMove(self.name, "store", key, block_id))

    def _make_room(self) -> bool:
        """Forget the least recently used keys that are not pinned."""
        while len(self._kept) >= self.capacity:
            oldest = next((key for key in self._kept if key not in self._pins), None)
            if oldest is None:
                return False
            self.forget(oldest)
        return True


def make(info: KVTierInfo, emit: Emit) -> DiskTier:
    """As the registry calls it."""
    return DiskTier(info, emit)
