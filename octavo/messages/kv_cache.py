"""What the groups of layers keep in the KV cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

MOST_ROWS = 2**27  # of the blocks of any sequence


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the KV cache. ``windows``: of each group of layers, None for full attention.

    ``element_size`` is bytes per stored number (2 for bf16), ``scale_size`` bytes of the scale of one token's K, or V,
    of one head (0: none). One block holds ``block_size`` tokens of the ``num_layers`` layers of one group. At most
    ``ahead`` tokens of a sequence are planned before the first of them has come back.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_size: int
    block_size: int
    scale_size: int = 0
    windows: tuple[int | None, ...] = (None,)
    ahead: int = 1

    @property
    def bytes_per_token(self) -> int:
        """Of one group: 2 (K and V) x layers x KV heads x (head dim x element size + scale size)."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.element_size + self.scale_size)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def entries_for(self, num_tokens: int) -> int:
        """Entries of the block tables of a sequence."""
        return -(-num_tokens // self.block_size) * len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at once while it grows to ``num_tokens``."""
        return blocks_at_once(num_tokens, self.block_size, self.windows, self.ahead)

    def blocks_held(self, num_tokens: int) -> int:
        """The same when nothing is ahead: blocks that no window sees any more have gone back."""
        return blocks_at_once(num_tokens, self.block_size, self.windows)

    def tokens_in(self, num_blocks: int) -> int:
        """See :func:`max_tokens_that_fit`."""
        return max_tokens_that_fit(num_blocks, self.block_size, self.windows, self.ahead)


def most_rows(window: int | None, block_size: int, ahead: int) -> int:
    """Blocks of a group that a sequence can hold at once, those before the window given back.

    The window and ``ahead`` tokens lie in them, wherever they begin: of these no step has come back, so that it is not
    known whether the tokens before them will be seen again.
    """
    return MOST_ROWS if window is None else -(-(window + ahead - 2) // block_size) + 1


def max_tokens_that_fit(
    num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), ahead: int = 1
) -> int:
    """The longest sequence that ``num_blocks`` blocks, the null block included, have room for."""
    usable = max(0, num_blocks - 1)
    lengths = range(0, MOST_ROWS * block_size, block_size)
    fitting = bisect_right(lengths, usable, key=lambda length: blocks_at_once(length, block_size, windows, ahead))
    return lengths[fitting - 1]


def blocks_at_once(num_tokens: int, block_size: int, windows: Sequence[int | None], ahead: int = 1) -> int:
    """Most blocks, of all groups, that a sequence holds at once while it grows to ``num_tokens``."""
    num_rows = -(-num_tokens // block_size)
    return sum(min(num_rows, most_rows(window, block_size, ahead)) for window in windows)
