"""TierLink: between a block manager and the tiers behind its pool, step by step.

Other requests may find a block before the step that fills it has come back. The link remembers which request fills
which block, so that if the step fails, all that hold the block can be told, even if the request has been preempted
since. Knows blocks by their ids, and neither tables nor indexes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from octavo.core.kv_cache.block import Block
from octavo.core.kv_cache.swaps import Swap, Swaps
from octavo.core.request import Request
from octavo.kv_transfer.chain import TierChain
from octavo.messages import KVMove, KVTierStats, ModelRunnerOutput, SchedulerOutput


class TierLink:
    """``chain``: the tiers, perhaps none."""

    __slots__ = ("_block_size", "_filling", "_in_flight", "chain", "swaps")

    def __init__(self, chain: TierChain, block_size: int) -> None:
        self.chain = chain
        self._block_size = block_size
        self.swaps = Swaps(chain, block_size)
        self._filling: dict[int, str] = {}  # block id -> id of the request that fills it in the step being planned
        self._in_flight: dict[int, dict[int, str]] = {}  # the same of steps that have not come back, by step id

    def find(self, request: Request, start: int, stop: int) -> list[bytes]:
        """Keys of the full blocks ``start .. stop`` of ``request``, as far as they can be loaded."""
        return self.chain.find(request.hashes(self._block_size)[start:stop]) if self.chain else []

    def fills(self, block: Block, request: Request) -> None:
        """The step being planned fills ``block`` for ``request``, and others may find it from now on."""
        self._filling[block.block_id] = request.request_id

    def reused(self, blocks: Iterable[Block]) -> None:
        """What a step in flight leaves in ``blocks`` is of no importance any more."""
        for step in (self._filling, *self._in_flight.values()):
            for block in blocks:
                step.pop(block.block_id, None)

    def evicted(self, key: bytes, block_id: int) -> None:
        """The pool gives up a block. One that a step in flight fills goes to no tier: that may fail."""
        if not self.is_filling(block_id):
            self.chain.evicted(key, block_id)

    def is_filling(self, block_id: int) -> bool:
        """A step that has not come back fills a block, or the one being planned."""
        return any(block_id in step for step in (self._filling, *self._in_flight.values()))

    def swap_out(
        self,
        request: Request,
        wanted: Swap,
        block_ids: Sequence[int],
        copies: Sequence[tuple[int, int]],
        *,
        whole: bool = False,
    ) -> None:
        """Keep the ``block_ids`` of ``request``, which gives them up, as ``wanted``, if a tier does that.

        If there is no room for all, then for as many as there is room, or for none where only the ``whole`` is of use.
        ``copies``: those of its part of the step that is being planned, which will not be made. Blocks that steps in
        flight fill for others are not kept: these may fail, and the request would not be told.
        """
        sources = {destination: source for source, destination in copies}
        unsure = {block_id for step in self._in_flight.values() for block_id in step}
        sound = list(takewhile(lambda block_id: block_id not in unsure, block_ids))
        if not whole or len(sound) == len(block_ids):
            self.swaps.keep(request, wanted, [sources.get(block_id, block_id) for block_id in sound], whole=whole)

    def take_moves(self, step_id: int) -> list[KVMove]:
        """The plan of step ``step_id`` is made; its moves between pool and tiers. It is to be settled or voided."""
        if self._filling:
            self._in_flight[step_id], self._filling = self._filling, {}
        return self.chain.take_moves(step_id)

    def settle(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> dict[int, str]:
        """A plan came back after ``seconds``. By block that it should have filled and did not, the request to blame.

        That request failed, even if it has been preempted since; "" where a block could not be loaded.
        """
        failed = self.chain.settle(plan.step_id, result.kv_tiers, plan.total_num_scheduled_tokens, seconds)
        filled = self._in_flight.pop(plan.step_id, {})
        spoiled = {block_id: request_id for block_id, request_id in filled.items() if request_id in result.errors}
        return spoiled | {block_id: "" for _, block_id in failed if block_id in filled}

    @staticmethod
    def misled(spoiled: Mapping[int, str], tables: Mapping[str, Sequence[Block]]) -> set[str]:
        """The requests of ``tables`` that hold a block that another request has spoiled."""
        if not spoiled:
            return set()
        return {
            request_id
            for request_id, blocks in tables.items()
            if any(spoiled.get(block.block_id, request_id) != request_id for block in blocks)
        }

    def void(self) -> None:
        """A step raised: no plan in flight will be settled."""
        self._in_flight.clear()
        self.chain.void()

    def clear(self) -> None:
        """Forget all that tiers hold."""
        self.swaps.clear()
        self.chain.clear()

    def stats(self) -> dict[str, KVTierStats]:
        """See ``TierChain.stats``."""
        return self.chain.stats()
