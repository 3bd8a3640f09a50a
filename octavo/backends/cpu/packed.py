"""Where packed weights lie: a directory of matrices and vectors, and the memory they are in.

Knows neither how panels are made (``weights``) nor files (``packed_cache``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.backends.cpu import _kernels

PAGE = 4096  # matrices and pieces begin at pages
_LINE = 64  # vectors at cache lines
_PIECE = 64 << 20


class PackedMatrix(msgspec.Struct, frozen=True, array_like=True):
    """A packed part of a matrix [n, k], as ``PartShape`` says; ``offset``, ``num_bytes``: where its panels are.

    ``gated``: 16 rows of a gate and 16 of what it gates alternate.
    """

    format: int
    n: int
    k: int
    group: int
    centred: bool
    has_minimum: bool
    scales: int
    offset: int
    num_bytes: int
    gated: bool = False

    @property
    def numbers(self) -> tuple[int, int, int, int, bool, bool, int]:
        """The arguments of ``PartShape``."""
        return self.format, self.n, self.k, self.group, self.centred, self.has_minimum, self.scales

    def shape(self) -> _kernels.PartShape:
        return _kernels.PartShape(*self.numbers)

    def bytes_needed(self, kernels: _kernels.Kernels) -> int:
        """What the kernels expect ``num_bytes`` to be."""
        return kernels.packed_bytes(self.shape())


class PackedVector(msgspec.Struct, frozen=True, array_like=True):
    """A float32 vector of ``size`` elements."""

    size: int
    offset: int


class Directory(msgspec.Struct):
    """What lies where in ``total`` bytes, a multiple of a page. A name stands for all that share its weights."""

    matrices: dict[str, list[PackedMatrix]]
    vectors: dict[str, PackedVector]
    total: int = 0

    @property
    def num_bytes(self) -> int:
        """Of matrices and vectors, without what is between them."""
        matrices = sum(part.num_bytes for parts in self.matrices.values() for part in parts)
        return matrices + sum(4 * vector.size for vector in self.vectors.values())

    def gated(self, owners: Mapping[str, str]) -> set[str]:
        """Names of matrices whose gates lie beside what they gate; ``owners``: parameter -> its name here."""
        return {name for name, owner in owners.items() if any(part.gated for part in self.matrices.get(owner, ()))}


class Pieces:
    """Memory that grows by large pieces, for offsets that begin at 0 and have no gap: a part never spans two pieces."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, _kernels.Memory]] = []  # (first offset, memory)
        self.total = 0

    def take(self, num_bytes: int, *, page: bool = True) -> int:
        """The offset of ``num_bytes`` of new zeroed memory, at the start of a page or of a cache line."""
        offset = -(-self.total // _LINE) * _LINE
        offset = -(-offset // PAGE) * PAGE if page else offset
        if not self._pieces or offset + num_bytes > self._end:
            offset = -(-self.total // PAGE) * PAGE
            self._pieces.append((offset, _kernels.Memory(max(-(-num_bytes // PAGE) * PAGE, _PIECE))))
        self.total = offset + num_bytes
        return offset

    @property
    def _end(self) -> int:
        first, memory = self._pieces[-1]
        return first + memory.num_bytes

    def address(self, offset: int) -> int:
        """Where ``offset`` is; valid while this object lives."""
        first, memory = next(piece for piece in reversed(self._pieces) if piece[0] <= offset)
        return memory.address + offset - first

    def close(self) -> None:
        """Nothing more will be taken: the total ends with a page."""
        self.total = -(-self.total // PAGE) * PAGE

    def spans(self, most: int) -> list[npt.NDArray[np.uint8]]:
        """All bytes in order, in arrays of ``most`` bytes or fewer."""
        ends = [first for first, _ in self._pieces[1:]] + [self.total]
        found = []
        for (first, memory), end in zip(self._pieces, ends):
            whole = as_bytes(memory.address, end - first)
            found += [whole[start : start + most] for start in range(0, len(whole), most)]
        return found


def as_bytes(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory as an array; the caller keeps it alive."""
    return np.frombuffer(memoryview((ctypes.c_char * num_bytes).from_address(address)), dtype=np.uint8)
