"""Pool memory without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from octavo.kv_transfer.base import ByteArray

BLOCK_BYTES = 1000


class Memory:
    """Blocks of BLOCK_BYTES in one array."""

    block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int = 16) -> None:
        self.blocks = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)

    def read_blocks(self, block_ids: Sequence[int], out: ByteArray) -> None:
        out[:] = self.blocks[list(block_ids)]

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        self.blocks[list(block_ids)] = data

    def fill(self, block_id: int, seed: int) -> None:
        self.blocks[block_id] = contents(seed)


def contents(seed: int) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def key_of(seed: int) -> bytes:
    return hashlib.sha256(seed.to_bytes(8)).digest()
