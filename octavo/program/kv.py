"""What layers keep in the KV cache, and which of them share blocks. Knows no blocks, no bytes and no tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer keeps of a token: ``num_heads`` keys of ``key_dim`` numbers and values of ``value_dim``.

    ``window``: tokens that a token sees at most, itself included; None: all before it.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def width(self) -> int:
        """Numbers a token."""
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """``layers`` of one ``window`` that share a block table; they lie in a block in this order."""

    layers: tuple[int, ...]
    window: int | None = None


def group_layers(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Groups of nearly equal width, so that one pool of equal blocks serves them all; at least one group.

    A group is as wide as all layers of the rarest window: 18 equal layers of which 3 are full make one group of 3 full
    layers and five of 3 sliding ones. Windows that are nearly as frequent get a group each, and the narrower group
    leaves a part of its blocks empty.
    """
    widths: dict[int | None, int] = defaultdict(int)
    for layer in layers:
        widths[layer.window] += layer.width
    room, most = min(widths.values(), default=0), max(widths.values(), default=0)
    if 4 * most < 5 * room:
        room = most
    room = max([room, *(layer.width for layer in layers)])
    groups: list[list[int]] = []
    latest: dict[int | None, tuple[list[int], int]] = {}  # by window: a group, and its width so far
    for number, layer in enumerate(layers):
        group, used = latest.get(layer.window, ([], room))
        if used + layer.width > room:
            group, used = [], 0
            groups.append(group)
        group.append(number)
        latest[layer.window] = group, used + layer.width
    return tuple(KVGroup(tuple(group), layers[group[0]].window) for group in groups) or (KVGroup(()),)
