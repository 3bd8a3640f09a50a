"""Block tables of the running requests, one permanent row each. Knows nothing of who owns a block or why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import Int32Array
from octavo.exceptions import RequestError


class BlockTables:
    """``table[g, row, i]`` is the block id (int32) of tokens ``[i * block_size, (i + 1) * block_size)`` in group g.

    0 if unused. Block ids come with those of all ``num_groups`` groups together, for the same tokens.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size, self.num_groups = block_size, num_groups
        self.table: Int32Array = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self._lengths: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)

    def assign(self, row: int, block_ids: Sequence[int]) -> None:
        """Make ``block_ids`` the whole table of ``row``. Raises RequestError beyond ``max_blocks``."""
        self.table[:, row] = 0
        self._lengths[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int], num_replaced: int = 0) -> None:
        """Append to the table of ``row``, in place of its last ``num_replaced`` blocks.

        Raises RequestError, changing nothing, beyond ``max_blocks``.
        """
        start = int(self._lengths[row]) - num_replaced // self.num_groups
        end = start + len(block_ids) // self.num_groups
        if end > self.table.shape[2]:
            raise RequestError(f"{end} blocks do not fit a block table of {self.table.shape[2]}")
        self.table[:, row, start:end] = np.reshape(block_ids, (-1, self.num_groups)).T
        self._lengths[row] = end

    def num_tokens(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many tokens the blocks of each of ``rows`` can hold."""
        room: npt.NDArray[np.int64] = self._lengths[rows] * self.block_size
        return room

    def slots(self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> Int32Array:
        """KV slots (block id * block size + offset) of position ``positions[i]`` of row ``rows[i]``, group by group.

        int32 ``[num_groups * n]``.
        """
        block, offset = np.divmod(positions, self.block_size)
        slots: Int32Array = self.table[:, rows, block] * np.int32(self.block_size) + offset.astype(np.int32)
        return slots.reshape(-1)

    def of(self, rows: npt.NDArray[np.integer]) -> Int32Array:
        """The tables of ``rows``, group by group: int32 ``[num_groups * len(rows), max_blocks]``."""
        return self.table[:, rows].reshape(-1, self.table.shape[2])
