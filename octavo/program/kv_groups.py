"""Which layers share KV blocks: groups of layers with the same sliding window. Knows no blocks and no tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroups:
    """``windows`` of the groups, None for full attention; a block holds ``layers_per_block`` layers of one group.

    Layer i is in group ``places[i][0]``, in place ``places[i][1]`` of its blocks.
    """

    windows: tuple[int | None, ...]
    layers_per_block: int
    places: tuple[tuple[int, int], ...]


def group_layers(windows: Sequence[int | None]) -> KVGroups:
    """Groups of equal size, so that one pool of equal blocks serves them all, as small as the rarest kind of layer.

    18 layers of which 3 are full make one group of 3 full layers and five of 3 sliding ones. Kinds that are nearly as
    frequent get a group each, with places left empty in the smaller one.
    """
    counts = Counter(windows)
    size, most = min(counts.values(), default=1), max(counts.values(), default=1)
    if 4 * most < 5 * size:
        size = most
    groups: list[int | None] = []
    latest: dict[int | None, tuple[int, int]] = {}
    places = []
    for window in windows:
        group, place = latest.get(window, (0, size - 1))
        if place == size - 1:
            group, place = len(groups), -1
            groups.append(window)
        latest[window] = group, place + 1
        places.append(latest[window])
    return KVGroups(tuple(groups) or (None,), size, tuple(places))
