"""EventLog: what became of the cached blocks since the last step, as messages for cache-aware routers."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.names import CacheEntry
from octavo.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVSpec
from octavo.messages.kv_events import MEDIUM

SPEC_KINDS = {  # vLLM's words
    "full": "full_attention",
    "latent": "mla_attention",
    "sliding": "sliding_window",
}


class NullEventLog:
    """Logs nothing, and so observes nothing."""

    def take(self) -> Sequence[KVEvent]:
        """No events."""
        return ()


NO_EVENTS = NullEventLog()


class EventLog:
    """An observer of the names. ``groups``: what each KV group keeps.

    Changes that follow each other and fit together are one event.
    """

    def __init__(self, groups: Sequence[KVSpec]) -> None:
        self._groups = groups
        self._events: list[KVEvent] = []

    def named(self, entry: CacheEntry) -> None:
        """See ``CacheObserver``."""
        group, number = entry.group, _number(entry.row_hash)
        parent = None if entry.parent is None else _number(entry.parent)
        extras = [entry.salt] if entry.parent is None and entry.salt is not None else None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group_idx == group and last.block_hashes[-1] == parent:
            last.block_hashes.append(number)
            last.token_ids += entry.token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(extras)
            return
        spec = self._groups[group]
        self._events.append(
            BlockStored(
                block_hashes=[number],
                parent_block_hash=parent,
                token_ids=list(entry.token_ids),
                block_size=len(entry.token_ids),
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=[extras],
                group_idx=group,
                kv_cache_spec_kind=SPEC_KINDS[spec.kind],
                kv_cache_spec_sliding_window=spec.window,
            )
        )

    def unnamed(self, entry: CacheEntry) -> None:
        """See ``CacheObserver``."""
        group, number = entry.group, _number(entry.row_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(number)
        else:
            self._events.append(BlockRemoved([number], MEDIUM, group))

    def cleared(self) -> None:
        """See ``CacheObserver``. What happened before does not matter any more."""
        self._events = [AllBlocksCleared()]

    def take(self) -> Sequence[KVEvent]:
        """The events since the last call, which are forgotten."""
        events, self._events = self._events, []
        return events


def _number(row_hash: bytes) -> int:
    """vLLM's form of a hash on the wire: its last 64 bits."""
    return int.from_bytes(row_hash[-8:])
