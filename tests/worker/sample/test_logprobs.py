"""Logprobs: values, ranks, ties, floor."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octavo.backends.sampling import FLOOR, token_logprobs

ROWS = arrays(
    np.float32, st.integers(1, 50), elements=st.one_of(st.sampled_from([-1.0, 0.0, 2.0]), st.floats(-60, 60, width=32))
)


@given(ROWS, st.data())
def test_values_ranks_and_ties(row, data):
    token = data.draw(st.integers(0, row.size - 1))
    k = data.draw(st.integers(0, row.size + 3))
    got = token_logprobs(row, token, k)
    order = sorted(range(row.size), key=lambda i: (-row[i], i))
    assert got.token_ids == [token, *order[:k]]
    assert got.ranks == [order.index(token) + 1, *range(1, min(k, row.size) + 1)]
    wide = row.astype(np.float64)
    exact = wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    np.testing.assert_allclose(got.logprobs, exact[got.token_ids], atol=2e-5)
    assert all(type(v) is float for v in got.logprobs)
    assert all(type(v) is int for v in got.token_ids + got.ranks)


def test_impossible_tokens_get_the_floor():
    row = np.full(20, -np.inf, np.float32)
    row[3], row[4] = 0.0, -3e38
    got = token_logprobs(row, 4, 5)
    assert got.logprobs == [FLOOR, 0.0, FLOOR, FLOOR, FLOOR, FLOOR]
    assert all(math.isfinite(value) for value in got.logprobs)
    assert got.token_ids == [4, 3, 4, 0, 1, 2]
