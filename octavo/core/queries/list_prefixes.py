"""ListPrefixes: what is cached and what is pinned. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_cache.prefix_tree import PrefixTree, PrefixUse, Row, blocks_of
from octavo.core.queries import CoreState
from octavo.messages import ListPrefixes, PrefixInfo, PrefixList


def answer(query: ListPrefixes, core: CoreState) -> PrefixList:
    """The prefixes that were used last, and all pins."""
    index, pins = core.kv.index, core.kv.cache.pins
    pin_ids: dict[bytes, list[str]] = {}
    for pin in pins.pins:
        pin_ids.setdefault(pin.prefix, []).append(pin.pin_id)
    tree = PrefixTree(index.names.entries())
    prefixes = tree.prefixes(marked=pin_ids)
    now, shown = core.clock(), query.num_preview_tokens
    return PrefixList(
        prefixes=[
            _describe(one, tree.path(one.last.row_hash), pin_ids.get(one.last.row_hash, []), shown, now)
            for one in prefixes[: query.limit]
        ],
        num_prefixes=len(prefixes),
        pins=[pins.describe(pin) for pin in pins.pins],
        num_cached_blocks=len(index),
        num_pinned_blocks=pins.num_blocks,
        max_pinned_blocks=pins.limits.blocks,
    )


def _describe(prefix: PrefixUse, rows: Sequence[Row], pin_ids: list[str], num_shown: int, now: float) -> PrefixInfo:
    """``rows``: all of the prefix; ``num_shown``: tokens at either end, for a preview."""
    last, blocks = prefix.last, blocks_of(rows)
    shown = 0 if last.salt is not None else num_shown
    tokens = [token_id for row in rows for token_id in row.token_ids] if shown else []
    return PrefixInfo(
        prefix=last.row_hash,
        num_tokens=last.num_tokens,
        num_blocks=len(blocks),
        num_used_blocks=sum(block.ref_count > 0 for block in blocks),
        hits=prefix.hits,
        idle=now - prefix.last_used,
        salted=last.salt is not None,
        pin_ids=pin_ids,
        head=tokens[:shown],
        tail=tokens[max(shown, len(tokens) - shown) :],
    )
