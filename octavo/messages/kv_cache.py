"""What the layers of a model keep of a sequence, group by group, and how many KV blocks that takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec

MOST_ROWS = 2**27  # of the blocks of any sequence

KVKind = Literal["full", "sliding", "latent", "state", "none"]


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one group of layers keeps of a sequence: so many bytes of each token, or of the whole request.

    ``full``: K and V of all tokens. ``sliding``: of the last ``window`` tokens, those that a token sees, itself
    included. ``latent``: one vector of each token for both. ``state``: one state, however many tokens. ``none``:
    nothing.
    """

    kind: KVKind = "full"
    bytes_per_token: int = 0
    bytes_per_request: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "sliding") != (self.window is not None):
            raise ValueError(f"a group of kind {self.kind} has the window {self.window}")

    def most_rows(self, block_size: int, ahead: int) -> int:
        """Most blocks of a sequence that are held at once, those before the window given back.

        The window and ``ahead`` tokens lie in them, wherever they begin: of these no step has come back, so that it is
        not known whether the tokens before them will be seen again.
        """
        return MOST_ROWS if self.window is None else -(-(self.window + ahead - 2) // block_size) + 1


def kind_of(window: int | None) -> KVKind:
    """The kind of attention whose tokens see ``window`` tokens, themselves included; None: all before them."""
    return "full" if window is None else "sliding"


FULL = KVSpec()
"""A group of full attention whose size does not matter."""


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the KV cache: one pool of equal blocks, each of which holds ``block_size`` tokens of one group.

    At most ``ahead`` tokens of a sequence are planned before the first of them has come back.
    """

    groups: tuple[KVSpec, ...]
    block_size: int
    ahead: int = 1

    @property
    def bytes_per_token(self) -> int:
        """Of all groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Of the largest group, for the blocks are equal: ``block_size`` tokens, or a state."""
        return max(max(self.block_size * one.bytes_per_token, one.bytes_per_request) for one in self.groups)

    def entries_for(self, num_tokens: int) -> int:
        """Entries of the block tables of a sequence."""
        return -(-num_tokens // self.block_size) * len(self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at once while it grows to ``num_tokens``."""
        return blocks_at_once(num_tokens, self.block_size, self.groups, self.ahead)

    def blocks_held(self, num_tokens: int) -> int:
        """The same when nothing is ahead: blocks that no window sees any more have gone back."""
        return blocks_at_once(num_tokens, self.block_size, self.groups)

    def tokens_in(self, num_blocks: int) -> int:
        """See :func:`max_tokens_that_fit`."""
        return max_tokens_that_fit(num_blocks, self.block_size, self.groups, self.ahead)


def max_tokens_that_fit(num_blocks: int, block_size: int, groups: Sequence[KVSpec] = (FULL,), ahead: int = 1) -> int:
    """The longest sequence that ``num_blocks`` blocks, the null block included, have room for."""
    usable = max(0, num_blocks - 1)
    lengths = range(0, MOST_ROWS * block_size, block_size)
    fitting = bisect_right(lengths, usable, key=lambda length: blocks_at_once(length, block_size, groups, ahead))
    return lengths[fitting - 1]


def blocks_at_once(num_tokens: int, block_size: int, groups: Sequence[KVSpec], ahead: int = 1) -> int:
    """Most blocks, of all groups, that a sequence holds at once while it grows to ``num_tokens``."""
    num_rows = -(-num_tokens // block_size)
    return sum(min(num_rows, group.most_rows(block_size, ahead)) for group in groups)
