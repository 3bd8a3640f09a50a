"""EventLog: what became of the named blocks since somebody asked, as messages for cache-aware routers."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.prefix_book import HASH_BYTES, Row
from octavo.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVSpec
from octavo.messages.kv_events import MEDIUM

SPEC_KINDS = {"full": "full_attention", "sliding": "sliding_window"}  # vLLM's words


class NullEventLog:
    """Nobody listens."""

    def stored(self, name: bytes, row: Row) -> None:
        """Nothing."""

    def removed(self, name: bytes) -> None:
        """Nothing."""

    def cleared(self) -> None:
        """Nothing."""

    def take(self) -> Sequence[KVEvent]:
        """Nothing ever happens."""
        return ()


NO_EVENTS = NullEventLog()


class EventLog:
    """``groups``: what those of a name keep. Neighbours that fit together are one event."""

    def __init__(self, groups: Sequence[KVSpec]) -> None:
        self._groups = groups
        self._events: list[KVEvent] = []

    def stored(self, name: bytes, row: Row) -> None:
        """A block with ``name`` can be found, of ``row``."""
        group, number = _group(name), _number(row.row_hash)
        parent = None if row.parent is None else _number(row.parent)
        extras = [row.salt] if row.parent is None and row.salt is not None else None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group_idx == group and last.block_hashes[-1] == parent:
            last.block_hashes.append(number)
            last.token_ids += row.token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(extras)
            return
        spec = self._groups[group]
        self._events.append(
            BlockStored(
                block_hashes=[number],
                parent_block_hash=parent,
                token_ids=list(row.token_ids),
                block_size=len(row.token_ids),
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=[extras],
                group_idx=group,
                kv_cache_spec_kind=SPEC_KINDS[spec.kind],
                kv_cache_spec_sliding_window=spec.window,
            )
        )

    def removed(self, name: bytes) -> None:
        """No block can be found under ``name`` any more."""
        group, number = _group(name), _number(name[:HASH_BYTES])
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(number)
        else:
            self._events.append(BlockRemoved([number], MEDIUM, group))

    def cleared(self) -> None:
        """Nothing can be found any more: what happened before is of no importance."""
        self._events = [AllBlocksCleared()]

    def take(self) -> Sequence[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def _group(name: bytes) -> int:
    return int.from_bytes(name[HASH_BYTES:])


def _number(row_hash: bytes) -> int:
    """vLLM's form of a hash on the wire: its last 64 bits."""
    return int.from_bytes(row_hash[-8:])
