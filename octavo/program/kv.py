"""What layers keep in the KV cache, and which of them share blocks. Knows no blocks, no bytes and no tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.messages import KVKind


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer keeps of a token: ``num_heads`` keys of ``key_dim`` numbers and values of ``value_dim``.

    ``kind`` and ``window`` are those of the ``KVSpec`` of its group.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    kind: KVKind = "full"
    window: int | None = None

    @property
    def width(self) -> int:
        """Numbers a token."""
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """``layers`` of one ``kind`` and ``window`` that share a block table; they lie in a block in this order."""

    layers: tuple[int, ...]
    kind: KVKind = "full"
    window: int | None = None


def group_layers(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Groups of nearly equal width, so that one pool of equal blocks serves them all; at least one group.

    A group is as wide as all layers of the rarest kind and window: 18 equal layers of which 3 are full make one group
    of 3 full layers and five of 3 sliding ones. Windows that are nearly as frequent get a group each, and the narrower
    group leaves a part of its blocks empty.
    """
    kinds = [(layer.kind, layer.window) for layer in layers]
    widths: dict[tuple[KVKind, int | None], int] = defaultdict(int)
    for kind, layer in zip(kinds, layers):
        widths[kind] += layer.width
    room, most = min(widths.values(), default=0), max(widths.values(), default=0)
    if 4 * most < 5 * room:
        room = most
    room = max([room, *(layer.width for layer in layers)])
    groups: list[list[int]] = []
    latest: dict[tuple[KVKind, int | None], tuple[list[int], int]] = {}  # by kind: a group, and its width so far
    for number, (kind, layer) in enumerate(zip(kinds, layers)):
        group, used = latest.get(kind, ([], room))
        if used + layer.width > room:
            group, used = [], 0
            groups.append(group)
        group.append(number)
        latest[kind] = group, used + layer.width
    return tuple(KVGroup(tuple(group), *kinds[group[0]]) for group in groups) or (KVGroup(()),)
