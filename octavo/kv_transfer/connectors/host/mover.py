"""HostMover: the host tier's memory. Knows places, not who planned them.

One array of all places, whose pages cost nothing until a block is stored there. Copies are made while the step waits:
a block of 0.4 MB takes less than 0.1 ms, computing it takes a hundred times as long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from octavo.exceptions import ConfigError
from octavo.kv_transfer.base import BlockMemory
from octavo.messages import KVMove, KVTierInfo, KVTierReport, KVTraffic


class HostMover:
    """See ``TierMover``. ``size``: most bytes of the tier.

    Raises ConfigError if that is less than a block, or more than the process may take.
    """

    def __init__(self, memory: BlockMemory, size: int) -> None:
        if size < memory.block_bytes:
            raise ConfigError(f"swap_space = {size / 2**30:g} GiB: a KV block takes {memory.block_bytes} bytes")
        self._memory = memory
        self.info = KVTierInfo(capacity=size // memory.block_bytes, block_bytes=memory.block_bytes)
        try:
            self._places = np.empty((self.info.capacity, memory.block_bytes), np.uint8)
        except MemoryError:
            raise ConfigError(f"swap_space = {size / 2**30:g} GiB: more than this process may take") from None
        self._loaded = self._stored = 0
        self._seconds = 0.0

    def move(self, moves: Sequence[KVMove]) -> None:
        """A drop means nothing: the place is stored to again."""
        if moves[0].kind == "store":
            for move in moves:
                self._memory.read_blocks([move.block_id], self._places[move.slot : move.slot + 1])
            self._stored += len(moves)
        elif moves[0].kind == "load":
            start = time.perf_counter()
            for move in moves:
                self._memory.write_blocks([move.block_id], self._places[move.slot : move.slot + 1])
            self._loaded += len(moves)
            self._seconds += time.perf_counter() - start

    def report(self) -> KVTierReport:
        size = self._memory.block_bytes
        traffic = KVTraffic(
            blocks_loaded=self._loaded,
            load_seconds=self._seconds,
            bytes_loaded=self._loaded * size,
            bytes_stored=self._stored * size,
        )
        self._loaded = self._stored = 0
        self._seconds = 0.0
        return KVTierReport(traffic=traffic)

    def close(self) -> None:
        """Nothing: its contents go with the process."""


def make(memory: BlockMemory, identity: str, *, size: int) -> HostMover:
    """As the registry calls it. Nothing here outlives the process, so ``identity`` does not matter."""
    return HostMover(memory, size)


def memory_bytes(*, size: int) -> int:
    """Main memory that the tier takes at most."""
    return size
