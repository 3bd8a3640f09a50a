"""HostTier: which block lies in which place of the host tier's memory. Knows no bytes.

Blocks come when the pool evicts them, or when a preempted request gives them up; the least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from octavo.kv_transfer.base import Emit
from octavo.messages import KVMove, KVTierInfo, KVTierReport


class HostTier:
    """See ``TierPlanner``. ``keeps_preempted``: preempted requests may hold blocks here."""

    name = "host"

    def __init__(self, info: KVTierInfo, emit: Emit, *, keeps_preempted: bool = False) -> None:
        self.capacity = info.capacity
        self._emit = emit
        self._keeps_preempted = keeps_preempted
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(info.capacity - 1, -1, -1))
        self._pins: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, key: bytes) -> bool:
        return key in self._slots

    def load(self, key: bytes, block_id: int) -> None:
        self._slots.move_to_end(key)
        self._emit(KVMove(self.name, "load", key, block_id, self._slots[key]))

    def used(self, key: bytes) -> None:
        if key in self._slots:
            self._slots.move_to_end(key)

    def filled(self, key: bytes, block_id: int) -> None:
        """Nothing: the pool has it."""

    def evicted(self, key: bytes, block_id: int) -> None:
        self._store(key, block_id)

    def hold(self, key: bytes, block_id: int) -> bool:
        if not self._keeps_preempted or not self._store(key, block_id):
            return False
        self.pin(key)
        return True

    def pin(self, key: bytes) -> None:
        if key in self._slots:
            self._pins[key] = self._pins.get(key, 0) + 1

    def release(self, key: bytes) -> None:
        if key in self._pins:
            self._pins[key] -= 1
            if self._pins[key] == 0:
                del self._pins[key]

    def forget(self, key: bytes) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
            self._pins.pop(key, None)

    def clear(self) -> None:
        for key in list(self._slots):
            self.forget(key)

    def void(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.forget(key)

    def settle(self, report: KVTierReport) -> None:
        """Nothing: stores end with their step."""

    def _store(self, key: bytes, block_id: int) -> bool:
        """Whether ``key`` is here then, as the most recently used one."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return True
        if not self._free and not self._make_room():
            return False
        self._slots[key] = self._free.pop()
        self._emit(KVMove(self.name, "store", key, block_id, self._slots[key]))
        return True

    def _make_room(self) -> bool:
        """Forget the least recently used key that is not pinned."""
        oldest = next((key for key in self._slots if key not in self._pins), None)
        if oldest is None:
            return False
        self.forget(oldest)
        return True


def make(info: KVTierInfo, emit: Emit, *, keeps_preempted: bool) -> HostTier:
    """As the registry calls it."""
    return HostTier(info, emit, keeps_preempted=keeps_preempted)
