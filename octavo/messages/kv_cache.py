"""What the groups of layers keep in the KV cache."""

from __future__ import annotations

import msgspec


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the KV cache. ``windows``: of each group of layers, None for full attention.

    ``element_size`` is bytes per stored number (2 for bf16), ``scale_size`` bytes of the scale of one token's K, or V,
    of one head (0: none). One block holds ``block_size`` tokens of the ``num_layers`` layers of one group.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_size: int
    block_size: int
    scale_size: int = 0
    windows: tuple[int | None, ...] = (None,)

    @property
    def bytes_per_token(self) -> int:
        """Of one group: 2 (K and V) x layers x KV heads x (head dim x element size + scale size)."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.element_size + self.scale_size)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a sequence in all groups, those before windows included."""
        return -(-num_tokens // self.block_size) * len(self.windows)

    def blocks_held(self, num_tokens: int) -> int:
        """The same without blocks that no window sees any more."""
        rows = -(-num_tokens // self.block_size)
        return sum(rows if w is None else min(rows, -(-(w - 1) // self.block_size) + 1) for w in self.windows)

    def tokens_in(self, num_blocks: int) -> int:
        """See :func:`max_tokens_that_fit`."""
        return max_tokens_that_fit(num_blocks, self.block_size, len(self.windows))


def max_tokens_that_fit(num_blocks: int, block_size: int, num_groups: int = 1) -> int:
    """Tokens of a sequence whose KV fits into ``num_blocks`` blocks, the null block included, in all groups."""
    return max(0, num_blocks - 1) // num_groups * block_size
