"""A map that forgets what was not used for longest. Knows nothing of grammars; not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most ``max_entries`` entries whose ``size``s sum up to at most ``max_size``; one alone may be larger."""

    def __init__(self, max_entries: int, max_size: int, size: Callable[[K, V], int]) -> None:
        self._max_entries, self._max_size, self._size = max_entries, max_size, size
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, now the last to be forgotten; None if there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry; others may be forgotten."""
        self.drop(key)
        self._entries[key] = value
        self._total += self._size(key, value)
        while len(self._entries) > 1 and (len(self._entries) > self._max_entries or self._total > self._max_size):
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        """Forget ``key`` if it is there."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._total -= self._size(key, value)
