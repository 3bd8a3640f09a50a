"""TierChain: all tiers behind the pool as one. Without any it is the null connector: nothing is found, kept or moved.

Knows neither requests nor tokens; the scheduler's block manager talks to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from octavo.kv_transfer.base import Emit, TierPlanner
from octavo.kv_transfer.costs import Costs
from octavo.messages import KVMove, KVTierReport, KVTierStats

MakeTier = Callable[[Emit], TierPlanner]


class TierChain:
    """Tiers, fastest first. ``block_size``: tokens of a block."""

    def __init__(self, tiers: Sequence[MakeTier] = (), block_size: int = 1, costs: Costs | None = None) -> None:
        self._moves: list[KVMove] = []  # of the next plan
        self._tiers = [make(self._moves.append) for make in tiers]
        self._by_name = {tier.name: tier for tier in self._tiers}
        self._costs = costs or Costs()
        self._block_size = block_size
        self._in_flight: dict[int, list[KVMove]] = {}  # by step id
        self._bytes: dict[str, tuple[int, int]] = {}  # loaded, stored

    def __bool__(self) -> bool:
        return bool(self._tiers)

    @property
    def has_moves(self) -> bool:
        """Something waits for the next plan."""
        return bool(self._moves)

    # ---- asked while a step is planned

    def finder(self) -> Callable[[bytes], bool]:
        """Whether a key can be loaded, and is worth it; until the next plan."""
        worth = [tier for tier in self._tiers if self._costs.worth(tier.name)]
        return lambda key: any(tier.has(key) for tier in worth)

    def find(self, keys: Iterable[bytes]) -> list[bytes]:
        """The leading ones of ``keys`` that the :meth:`finder` finds."""
        return list(takewhile(self.finder(), keys))

    def has(self, key: bytes) -> bool:
        """Can ``key`` be loaded, whether or not it is worth it?"""
        return any(tier.has(key) for tier in self._tiers)

    def has_tier(self, name: str) -> bool:
        """Is there a tier called ``name``?"""
        return name in self._by_name

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep what was found while room is made for it. To be released."""
        for key in keys:
            for tier in self._tiers:
                tier.pin(key)

    def release(self, keys: Iterable[bytes]) -> None:
        """Undo a :meth:`pin` or a :meth:`hold`."""
        for key in keys:
            for tier in self._tiers:
                tier.release(key)

    def load(self, key: bytes, block_id: int) -> None:
        """The next plan fills a block with a key that was found."""
        next(tier for tier in self._tiers if tier.has(key)).load(key, block_id)

    def used(self, keys: Iterable[bytes]) -> None:
        """See ``TierPlanner.used``."""
        for key in keys:
            for tier in self._tiers:
                tier.used(key)

    def filled(self, key: bytes, block_id: int) -> None:
        """See ``TierPlanner.filled``."""
        for tier in self._tiers:
            tier.filled(key, block_id)

    def evicted(self, key: bytes, block_id: int) -> None:
        """See ``TierPlanner.evicted``."""
        for tier in self._tiers:
            tier.evicted(key, block_id)

    def hold(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[bytes]:
        """Keep the contents of blocks that are being given up; the leading keys that are kept, until released."""
        held = []
        for key, block_id in zip(keys, block_ids, strict=True):
            if not any(tier.hold(key, block_id) for tier in self._tiers):
                break
            held.append(key)
        return held

    def forget(self, keys: Iterable[bytes]) -> None:
        """The blocks with ``keys`` hold anything."""
        for key in keys:
            for tier in self._tiers:
                tier.forget(key)

    def clear(self) -> None:
        """Forget everything."""
        for tier in self._tiers:
            tier.clear()

    # ---- plans and their results

    def take_moves(self, step_id: int) -> list[KVMove]:
        """All moves planned since the last call: those of step ``step_id``, which will be settled or voided."""
        moves = list(self._moves)
        self._moves.clear()
        if moves:
            self._in_flight[step_id] = moves
        return moves

    def settle(
        self, step_id: int, reports: dict[str, KVTierReport], num_tokens: int, seconds: float
    ) -> list[tuple[bytes, int]]:
        """Step ``step_id`` came back after ``seconds``, with ``num_tokens`` computed.

        Returns the loads, as (key, block id), that failed: the keys are forgotten, the blocks hold anything.
        """
        self._in_flight.pop(step_id, None)
        failed: list[tuple[bytes, int]] = []
        for name, report in reports.items():
            traffic = report.traffic
            self._by_name[name].settle(report)
            self._costs.loaded(name, traffic.blocks_loaded * self._block_size, traffic.load_seconds)
            loaded, stored = self._bytes.get(name, (0, 0))
            self._bytes[name] = (loaded + traffic.bytes_loaded, stored + traffic.bytes_stored)
            seconds -= traffic.load_seconds
            failed += report.failed
        self._costs.computed(num_tokens, seconds)
        self.forget(key for key, _ in failed)
        return failed

    def void(self) -> None:
        """Steps raised: which of their stores and drops were made is unknown."""
        moves = [move for step in self._in_flight.values() for move in step]
        self._in_flight.clear()
        self._moves[:0] = [move for move in moves if move.kind == "drop"]
        for tier in self._tiers:
            tier.void([move.key for move in moves if move.kind == "store" and move.tier == tier.name])

    def stats(self) -> dict[str, KVTierStats]:
        """By tier; bytes count since the last call."""
        stats = {}
        for tier in self._tiers:
            loaded, stored = self._bytes.pop(tier.name, (0, 0))
            usage = len(tier) / tier.capacity if tier.capacity else 0.0
            stats[tier.name] = KVTierStats(usage=usage, loaded_bytes_delta=loaded, stored_bytes_delta=stored)
        return stats
