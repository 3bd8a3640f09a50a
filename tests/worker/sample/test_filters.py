"""Order, top-k, min-p, top-p and the draw against plain definitions in Python and float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octavo.backends.sampling import _first_above, descending, inverse_cdf, min_p, top_k, top_p, uniform, weights

# Few distinct values, so that ties are the rule.
TIED = arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1e-40, 0.5, 3.0]))
FREE = arrays(np.float32, st.integers(1, 60), elements=st.floats(-50, 50, width=32))
ROWS = st.one_of(TIED, FREE)


def ranked(row: np.ndarray) -> list[int]:
    return sorted(range(row.size), key=lambda i: (-row[i], i))


@given(ROWS)
def test_descending_is_the_stable_order(row):
    assert descending(row).tolist() == ranked(row)


@given(ROWS, st.integers(1, 70))
def test_top_k_is_the_head_of_the_order(row, k):
    assert top_k(row, k).tolist() == ranked(row)[:k]


def test_top_k_of_a_large_row():
    row = np.random.default_rng(0).standard_normal(50_000).astype(np.float32).round(2)
    for k in (1, 50, 49_999, 50_000, 10**9):
        assert top_k(row, k).tolist() == ranked(row)[:k]


@given(FREE, st.floats(0.01, 2))
def test_weights_are_softmax_up_to_a_factor(row, temperature):
    got = weights(row, temperature)
    expected = np.exp((row.astype(np.float64) - row.max()) / temperature)
    assert got.dtype == np.float32
    assert got.max() == 1.0
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-37)


@given(FREE, st.floats(0.001, 1))
def test_min_p_is_relative_to_the_most_probable(row, threshold):
    mass = weights(row, 1.0)
    probabilities = mass.astype(np.float64) / mass.sum(dtype=np.float64)
    expected = [i for i, p in enumerate(probabilities) if p >= np.float32(threshold) * probabilities.max()]
    kept = min_p(mass, threshold).tolist()
    # Only an entry within rounding of the threshold may differ.
    for i in set(kept) ^ set(expected):
        assert mass[i] == pytest.approx(threshold, rel=1e-6)
    assert int(mass.argmax()) in kept


def test_min_p_keeps_what_is_exactly_at_the_threshold():
    assert min_p(np.array([0.25, 1.0, 0.5, 0.4999], np.float32), 0.5).tolist() == [1, 2]


@given(ROWS.filter(lambda row: row.max() > -np.inf), st.floats(0.001, 1))
def test_top_p_is_the_smallest_head_with_the_mass(row, mass):
    values = weights(row, 1.0)
    kept = top_p(values, mass).tolist()
    head = ranked(values)[: len(kept)]
    assert kept == sorted(head)
    sums = np.cumsum(values[head].astype(np.float64)) / values.sum(dtype=np.float64)
    assert sums[-1] >= mass - 1e-12
    assert len(kept) == 1 or sums[-2] < mass


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("mass", [0.01, 0.5, 0.95, 0.9999, 1 - 1e-12])
def test_top_p_of_a_large_row(spread, mass):
    """Flat and peaked rows meet every threshold of the search."""
    values = weights((spread * np.random.default_rng(1).standard_normal(20_000)).astype(np.float32), 1.0)
    order = ranked(values)
    sums = np.cumsum(values[order], dtype=np.float64)
    wanted = mass * values.sum(dtype=np.float64)
    expected = order[: int(np.searchsorted(sums, wanted)) + 1]
    assert top_p(values, mass).tolist() == sorted(expected)


@given(arrays(np.float32, st.integers(1, 900), elements=st.sampled_from([0.0, 0.0, 1e-38, 0.25, 1.0])), st.data())
def test_inverse_cdf_hits_the_interval(mass, data):
    mass[data.draw(st.integers(0, mass.size - 1))] = 1.0
    u = data.draw(st.floats(0, 1, exclude_max=True))
    index = inverse_cdf(mass, u)
    assert mass[index] > 0
    sums = np.cumsum(mass, dtype=np.float64) / mass.sum(dtype=np.float64)
    assert sums[index] >= u - 1e-6
    assert index == 0 or sums[index - 1] <= u + 1e-6


def test_a_target_that_rounding_put_at_the_sum_takes_the_last_positive_entry():
    mass = np.array([1.0, 2.0, 0.0, 0.0], np.float32)
    assert _first_above(mass, 3.0) == (1, 1.0)
    assert _first_above(mass, 3.1) == (1, 1.0)
    assert _first_above(mass, 1.0) == (1, 1.0)
    assert _first_above(mass, 0.0) == (0, 0.0)


def test_inverse_cdf_walks_every_entry_once():
    """With 600 equal weights, the middle of each interval gives each index."""
    mass = np.ones(600, np.float32)
    assert [inverse_cdf(mass, (i + 0.5) / 600) for i in range(600)] == list(range(600))
    assert inverse_cdf(mass, np.nextafter(1.0, 0.0)) == 599


def test_uniform_is_philox_and_depends_on_every_part_of_the_key():
    # Random123's known answer for philox4x64-10, key and counter 0, is 0x16554d9eca36314c for the first word; numpy
    # steps the counter before it draws, so position p is the block at counter p + 1.
    counter = np.array([2**64 - 1] * 4, np.uint64)
    assert np.random.Philox(key=np.zeros(2, np.uint64), counter=counter).random_raw() == 0x16554D9ECA36314C
    first = uniform(1, 2, 3)
    assert first == uniform(1, 2, 3)
    assert 0 <= first < 1
    assert len({first, uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4), uniform(-1, 2, 3)}) == 5
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


@pytest.mark.parametrize("vary", ["seed", "sample_index", "position"])
def test_uniform_is_uniform_along_every_part_of_the_key(vary):
    draws = [uniform(**{"seed": 5, "sample_index": 1, "position": 9, vary: i}) for i in range(8000)]
    counts = np.histogram(draws, bins=16, range=(0, 1))[0]
    statistic = ((counts - 500) ** 2 / 500).sum()
    assert statistic < 37.7  # chi-square, 15 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.04
