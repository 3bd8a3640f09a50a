"""Block tables of the running requests, one permanent row each. Knows nothing of who owns a block or why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import Int32Array
from octavo.exceptions import RequestError


class BlockTables:
    """``table[row, i]`` is the block id (int32) of tokens ``[i * block_size, (i + 1) * block_size)``; 0 if unused."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.table: Int32Array = np.zeros((num_rows, max_blocks), np.int32)
        self._lengths: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)

    def assign(self, row: int, block_ids: Sequence[int]) -> None:
        """Make ``block_ids`` the whole table of ``row``. Raises RequestError beyond ``max_blocks``."""
        self.table[row] = 0
        self._lengths[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int], num_replaced: int = 0) -> None:
        """Append to the table of ``row``, in place of its last ``num_replaced`` blocks.

        Raises RequestError, changing nothing, beyond ``max_blocks``.
        """
        start = int(self._lengths[row]) - num_replaced
        end = start + len(block_ids)
        if end > self.table.shape[1]:
            raise RequestError(f"{end} blocks do not fit a block table of {self.table.shape[1]}")
        self.table[row, start:end] = block_ids
        self._lengths[row] = end

    def num_tokens(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many tokens the blocks of each of ``rows`` can hold."""
        room: npt.NDArray[np.int64] = self._lengths[rows] * self.block_size
        return room

    def slots(self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> Int32Array:
        """KV slot (block id * block size + offset), int32 ``[n]``, of position ``positions[i]`` of row ``rows[i]``."""
        block, offset = np.divmod(positions, self.block_size)
        slots: Int32Array = self.table[rows, block] * np.int32(self.block_size) + offset.astype(np.int32)
        return slots
