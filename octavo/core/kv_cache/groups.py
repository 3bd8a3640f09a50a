"""What a sequence needs of each group of layers: one strategy for each kind of ``KVSpec``. Knows no blocks.

A row is ``block_size`` tokens of a sequence, and each group has a block for each row. With blocks of 16 tokens, when
the next token is number 50 and nothing is planned ahead:

    rows                0           1           2           3
    tokens            0 .. 15    16 .. 31    32 .. 47    48 .. 63     first row    most rows
    full               needed     needed      needed      needed          0           all
    window of 20      given back  needed      needed      needed          1            3

A new kind answers the same two questions. A recurrent state is kept in the block of the row whose tokens it has seen
last: a token needs that of the token before it, ``first_row(n) = max(0, n - 1) // block_size``, and a cached prefix
needs the state at its end alone; the worker starts a row from the state of the row before. The layers of a draft model
are further groups of their own kinds. Layers that keep nothing are in no group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.exceptions import ConfigError
from octavo.messages import KVKind, KVSpec


class GroupStrategy(Protocol):
    """``most_rows``: most rows of a sequence that are held at once.

    ``gives_back``: whether rows that no later token sees go back to the pool; else all are kept, and needed.
    """

    most_rows: int
    gives_back: bool

    def first_row(self, num_tokens: int) -> int:
        """The first row that the token behind ``num_tokens`` tokens sees; it and those after it see no row before.

        A cached prefix of ``num_tokens`` tokens is one if the rows from this one on are there; a fork of so many tokens
        needs them of its parent; and the rows before it go back once all of these tokens are confirmed.
        """
        ...


class FullAttention:
    """A GroupStrategy: a token sees all before it. So do latents (MLA), which only have other sizes."""

    __slots__ = ("gives_back", "most_rows")

    def __init__(self, spec: KVSpec, block_size: int, ahead: int) -> None:
        self.most_rows, self.gives_back = spec.most_rows(block_size, ahead), False

    def first_row(self, num_tokens: int) -> int:
        """See ``GroupStrategy.first_row``."""
        return 0


class SlidingWindow:
    """A GroupStrategy: a token sees ``spec.window`` tokens, itself included."""

    __slots__ = ("_block_size", "_window", "gives_back", "most_rows")

    def __init__(self, spec: KVSpec, block_size: int, ahead: int) -> None:
        assert spec.window is not None
        self.most_rows, self.gives_back = spec.most_rows(block_size, ahead), True
        self._window, self._block_size = spec.window, block_size

    def first_row(self, num_tokens: int) -> int:
        """See ``GroupStrategy.first_row``."""
        return max(0, num_tokens - self._window + 1) // self._block_size


GROUPS: dict[KVKind, Callable[[KVSpec, int, int], GroupStrategy]] = {
    "full": FullAttention,
    "latent": FullAttention,
    "sliding": SlidingWindow,
}


def make_groups(specs: Sequence[KVSpec], block_size: int, ahead: int) -> tuple[GroupStrategy, ...]:
    """The strategies of a program's groups. ``ahead``: see ``KVCacheSpec``. Raises ConfigError for an unknown kind."""
    unknown = [spec.kind for spec in specs if spec.kind not in GROUPS]
    if unknown:
        raise ConfigError(f"a KV group of kind {unknown[0]}: must be one of {', '.join(GROUPS)}")
    return tuple(GROUPS[spec.kind](spec, block_size, ahead) for spec in specs)
