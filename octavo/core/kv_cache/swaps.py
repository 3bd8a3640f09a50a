"""Swaps: what preempted requests have left in a tier, the last, partly filled block too. Knows no block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.kv_cache.hashing import hash_block
from octavo.core.request import Request
from octavo.kv_transfer.chain import TierChain


class _Swap(NamedTuple):
    keys: list[bytes]  # held in a tier, block by block
    num_tokens: int


class Swaps:
    """By request. A block's key is the hash of what it holds, so equal blocks are kept once, whoever left them."""

    __slots__ = ("_block_size", "_swaps", "_tiers")

    def __init__(self, tiers: TierChain, block_size: int) -> None:
        self._tiers, self._block_size = tiers, block_size
        self._swaps: dict[str, _Swap] = {}

    def keep(self, request: Request, block_ids: Sequence[int]) -> None:
        """``request`` is being preempted; its first tokens are in ``block_ids``. Keeps what a tier has room for."""
        size = self._block_size
        num_tokens = min(request.num_confirmed_tokens, len(block_ids) * size)
        num_full = num_tokens // size
        keys = request.hashes(size)[:num_full]
        if num_tokens % size:
            tail = request.token_ids[num_full * size : num_tokens]
            keys.append(hash_block(keys[-1] if keys else None, tail, request.extras(num_full)))
        held = self._tiers.hold(keys, block_ids)
        if held:
            self._swaps[request.request_id] = _Swap(held, min(num_tokens, len(held) * size))

    def find(self, request: Request, num_blocks: int) -> tuple[list[bytes], int]:
        """Keys of the blocks after the first ``num_blocks`` that can be loaded, and how many tokens they end at."""
        swap = self._swaps.get(request.request_id)
        if swap is None:
            return [], 0
        keys = self._tiers.find(swap.keys[num_blocks:])
        return keys, min(swap.num_tokens, (num_blocks + len(keys)) * self._block_size)

    def drop(self, request_id: str) -> None:
        """Nothing is kept for this request any longer."""
        swap = self._swaps.pop(request_id, None)
        if swap is not None:
            self._tiers.release(swap.keys)

    def clear(self) -> None:
        """Drop all."""
        for request_id in list(self._swaps):
            self.drop(request_id)
