"""Movers: all tiers of a worker. Without any it is the null connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from octavo.kv_transfer.base import TierMover
from octavo.messages import KVMove, KVTierInfo, KVTierReport


class Movers:
    """Tiers by name."""

    def __init__(self, movers: Mapping[str, TierMover]) -> None:
        self._movers = dict(movers)

    def infos(self) -> dict[str, KVTierInfo]:
        """The tiers as they were opened."""
        return {name: mover.info for name, mover in self._movers.items()}

    def run(self, moves: Sequence[KVMove]) -> dict[str, KVTierReport]:
        """Do ``moves`` in order; the reports of all tiers."""
        for (tier, _), group in groupby(moves, lambda move: (move.tier, move.kind)):
            self._movers[tier].move(list(group))
        return {name: mover.report() for name, mover in self._movers.items()}

    def close(self) -> None:
        """Close all tiers."""
        for mover in self._movers.values():
            mover.close()
