"""The tests' own grids: every pair of values is there, and they are much smaller than full ones."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(3, 5, 2, 9), (2, 2, 2), (57, 3, 4), (1, 4), (7, 7, 7)])
def test_every_pair_occurs(sizes: tuple[int, ...]) -> None:
    rows = pairwise(*map(range, sizes))
    for first, second in itertools.combinations(range(len(sizes)), 2):
        pairs = {(row[first], row[second]) for row in rows}
        assert pairs == set(itertools.product(range(sizes[first]), range(sizes[second])))
    largest, next_largest = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * next_largest <= len(rows) <= 1.5 * largest * next_largest
    assert pairwise(*map(range, sizes)) == rows
