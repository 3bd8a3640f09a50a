"""Swaps: what requests that do not run have left in a tier, the last, partly filled block too. Knows no block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.kv_cache.hashing import hash_block
from octavo.core.request import Request
from octavo.kv_transfer.chain import TierChain


class Swap(NamedTuple):
    """Blocks that are held in a tier, and how many leading tokens they hold."""

    keys: list[bytes]
    num_tokens: int


class Swaps:
    """By request. A block's key is the hash of what it holds, so equal blocks of several requests are kept once."""

    __slots__ = ("_block_size", "_swaps", "_tiers")

    def __init__(self, tiers: TierChain, block_size: int) -> None:
        self._tiers, self._block_size = tiers, block_size
        self._swaps: dict[str, Swap] = {}

    def keep(self, request: Request, wanted: Swap, block_ids: Sequence[int], *, whole: bool) -> None:
        """Hold the ``block_ids`` of ``request`` under the leading keys of what is ``wanted``.

        As many as a tier has room for, unless only the ``whole`` is of use.
        """
        held = self._tiers.hold(wanted.keys[: len(block_ids)], block_ids)
        if len(held) == len(wanted.keys):
            self._swaps[request.request_id] = wanted
        elif whole:
            self._tiers.release(held)
        elif held:
            self._swaps[request.request_id] = Swap(held, len(held) * self._block_size)

    def of(self, request: Request) -> Swap | None:
        """What is held for this request."""
        return self._swaps.get(request.request_id)

    def find(self, request: Request, num_blocks: int) -> tuple[list[bytes], int]:
        """Keys of the blocks after the first ``num_blocks`` that can be loaded, and how many tokens they end at."""
        swap = self._swaps.get(request.request_id)
        if swap is None:
            return [], 0
        keys = self._tiers.find(swap.keys[num_blocks:])
        return keys, min(swap.num_tokens, (num_blocks + len(keys)) * self._block_size)

    def inherit(self, parent_id: str, child: Request) -> None:
        """What is held for ``parent_id`` is held for ``child`` too, whose tokens begin with the parent's."""
        swap = self._swaps.get(parent_id)
        if swap is not None:
            self._tiers.pin(swap.keys)
            self._swaps[child.request_id] = swap

    def drop(self, request_id: str) -> None:
        """Nothing is kept for this request any longer."""
        swap = self._swaps.pop(request_id, None)
        if swap is not None:
            self._tiers.release(swap.keys)

    def clear(self) -> None:
        """Drop all."""
        for request_id in list(self._swaps):
            self.drop(request_id)


def block_keys(request: Request, num_tokens: int, block_size: int) -> list[bytes]:
    """Keys of the blocks with the first ``num_tokens`` tokens of ``request``, the last one perhaps partly filled."""
    num_full, rest = divmod(num_tokens, block_size)
    keys = request.hashes(block_size)[:num_full]
    if rest:
        tail = request.token_ids[num_full * block_size : num_tokens]
        keys.append(hash_block(keys[-1] if keys else None, tail, request.extras(num_full)))
    return keys
