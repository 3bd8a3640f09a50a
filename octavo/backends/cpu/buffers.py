"""Buffers of a lowered program: who lives when, and where in one arena. Knows nothing of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 16  # floats: one cache line


@dataclass(slots=True, eq=False)
class Buffer:
    """``floats`` of memory, rows ``stride`` floats apart, in use from phase ``first`` to phase ``last``."""

    floats: int
    stride: int
    first: int = -1
    last: int = -1
    offset: int = -1

    def touch(self, phase: int) -> None:
        """The buffer is read or written in ``phase``."""
        self.first = phase if self.first < 0 else self.first
        self.last = max(self.last, phase)


@dataclass(frozen=True, slots=True)
class View:
    """Columns of a buffer, from ``column`` on."""

    buffer: Buffer
    column: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """(floats from the start of the arena, floats between rows), once the arena is planned."""
        assert self.buffer.offset >= 0
        return self.buffer.offset + self.column, self.buffer.stride


def plan_arena(buffers: Sequence[Buffer]) -> int:
    """Gives every buffer an offset, so that buffers in use in the same phase never overlap. Returns the arena's floats.

    Largest first, each at the lowest place that is free through its whole life.
    """
    placed: list[Buffer] = []
    end_of_arena = 0
    for buffer in sorted(buffers, key=lambda b: -b.floats):
        size = _round_up(buffer.floats)
        offset = 0
        for other in placed:  # by offset
            if other.last < buffer.first or buffer.last < other.first:
                continue
            if offset + size <= other.offset:
                break
            offset = max(offset, other.offset + _round_up(other.floats))
        buffer.offset = offset
        placed.append(buffer)
        placed.sort(key=lambda b: b.offset)
        end_of_arena = max(end_of_arena, offset + size)
    return end_of_arena


def _round_up(floats: int) -> int:
    return max(1, -(-floats // _ALIGNMENT)) * _ALIGNMENT
