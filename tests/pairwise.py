"""Combinations of several axes in which every pair of values of two axes occurs, instead of a full grid.

A fault that one value causes, or two values together, is met as surely as by the full grid; only one that takes three
values of three axes at once may be missed. So a grid may become pairwise where each of its tests does much more than
its axes say (a random run, sequences cut in many ways).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A tuple of one value an axis for each pair of values of two axes, and few more; the same ones every time."""
    places = [range(len(axis)) for axis in axes]
    numbers = list(itertools.combinations(range(len(axes)), 2))
    missing = {(i, a, j, b): None for i, j in numbers for a in places[i] for b in places[j]}
    rows: list[tuple[int, ...]] = []
    while missing:
        i, a, j, b = next(iter(missing))
        row = {i: a, j: b}
        for axis in sorted(set(range(len(axes))) - row.keys()):  # the value that meets most new ones
            row[axis] = max(
                places[axis],
                key=lambda place: sum(_pair(axis, place, *other) in missing for other in row.items()),
            )
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop((*pair[0], *pair[1]), None)
        rows.append(tuple(row[axis] for axis in range(len(axes))))
    return [tuple(axis[place] for axis, place in zip(axes, row, strict=True)) for row in sorted(rows)]


def _pair(i: int, a: int, j: int, b: int) -> tuple[int, int, int, int]:
    return (i, a, j, b) if i < j else (j, b, i, a)
