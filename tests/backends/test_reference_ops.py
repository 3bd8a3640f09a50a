"""Each op of the reference against PyTorch's own or a formula written out; and rows do not know their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from octavo.backends.reference import ops

RNG = np.random.default_rng(2)
DTYPES = [np.float32, np.float64]


def randn(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def close(actual: np.ndarray, expected: torch.Tensor, dtype: type) -> None:
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_norm_and_gate(dtype: type) -> None:
    x, w, bias, norm = (
        randn(5, 24, dtype=dtype),
        randn(7, 24, dtype=dtype),
        randn(7, dtype=dtype),
        randn(24, dtype=dtype),
    )
    t = torch.from_numpy
    close(ops.linear(x, w), functional.linear(t(x), t(w)), dtype)
    close(ops.linear(x, w, bias), functional.linear(t(x), t(w), t(bias)), dtype)
    close(ops.rms_norm(x, norm, 1e-5), functional.rms_norm(t(x), (24,), t(norm), 1e-5), dtype)
    close(ops.silu_mul(x), functional.silu(t(x[:, :12])) * t(x[:, 12:]), dtype)


def test_gate_far_from_zero() -> None:
    x = np.array([[-1000.0, 1000.0, 3.0, 2.0]], dtype=np.float32)
    with np.errstate(invalid="raise", over="raise", divide="raise"):
        np.testing.assert_array_equal(ops.silu_mul(x), [[0.0, 2000.0]])


@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_is_a_rotation_of_pairs(rotated: int) -> None:
    """Pair (j, j + P) as a complex number, times exp(i * position * inv_freq[j])."""
    positions, inv_freq = (
        np.array([0, 1, 77], dtype=np.int32),
        [10000 ** (-2 * j / rotated) for j in range(rotated // 2)],
    )
    x, pairs = randn(3, 16, dtype=np.float64), rotated // 2
    heads = x.reshape(3, 2, 8)
    turned = (heads[..., :pairs] + 1j * heads[..., pairs:rotated]) * 1.5
    turned = turned * np.exp(1j * positions[:, None, None] * np.float32(inv_freq).astype(float))
    expected = np.concatenate([turned.real, turned.imag, heads[..., rotated:]], axis=-1).reshape(3, 16)
    np.testing.assert_allclose(ops.rope(x, positions, 8, inv_freq, 1.5), expected, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_over_scattered_blocks(heads: int, kv_heads: int) -> None:
    """Two requests with their pasts in blocks of any order, against scaled_dot_product_attention on each."""
    dim, block_size, blocks = 8, 4, 12
    key_cache, value_cache = randn(2, blocks, block_size, kv_heads, dim, dtype=np.float64)
    tables = np.array([[7, 2, 9], [4, 11, 0]], dtype=np.int32)
    lengths, queries = [11, 6], [3, 6]
    q = randn(9, heads * dim, dtype=np.float64)
    seq_of_row = np.array([0] * 3 + [1] * 6, dtype=np.int32)
    positions = np.array([8, 9, 10, 0, 1, 2, 3, 4, 5], dtype=np.int32)
    out = ops.paged_attention(q, key_cache, value_cache, tables, seq_of_row, positions, 0.3)
    start = 0
    for s, (length, count) in enumerate(zip(lengths, queries)):
        past = [
            torch.from_numpy(cache[tables[s]].reshape(-1, kv_heads, dim)[:length].copy()).transpose(0, 1)
            for cache in (key_cache, value_cache)
        ]
        query = torch.from_numpy(q[start : start + count].reshape(count, heads, dim)).transpose(0, 1)
        mask = torch.arange(length)[None, :] <= torch.arange(length - count, length)[:, None]
        expected = functional.scaled_dot_product_attention(query, *past, attn_mask=mask, scale=0.3, enable_gqa=True)
        rows = out[start : start + count].reshape(count, heads, dim)
        np.testing.assert_allclose(rows, expected.transpose(0, 1).numpy(), atol=1e-12)
        start += count


def test_written_rows_land_in_their_slots_and_nowhere_else() -> None:
    cache = np.zeros((3, 4, 2, 5), np.float32)
    rows = randn(2, 10)
    ops.write_kv(cache, rows, np.array([9, 2], dtype=np.int32))
    np.testing.assert_array_equal(cache[2, 1], rows[0].reshape(2, 5))
    np.testing.assert_array_equal(cache[0, 2], rows[1].reshape(2, 5))
    assert np.count_nonzero(cache) == 20


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_rows_do_not_depend_on_their_neighbours(count: int) -> None:
    x, w, norm = randn(64, 96), randn(130, 96), randn(96)
    positions = np.arange(64, dtype=np.int32)
    for op in (
        lambda x, p: ops.linear(x, w),
        lambda x, p: ops.rms_norm(x, norm, 1e-6),
        lambda x, p: ops.silu_mul(x),
        lambda x, p: ops.rope(x, p, 8, [1.0, 0.3, 0.1]),
    ):
        whole = op(x, positions)
        for start in range(0, 64 - count + 1, count):
            part = op(x[start : start + count], positions[start : start + count])
            np.testing.assert_array_equal(part, whole[start : start + count])


def test_int8_rounding_is_to_nearest_even_of_the_heads_greatest() -> None:
    rows = np.array([[127.0, 0.5, 1.5, -2.5, 0.0, 0.0, 0.0, 0.0, 12.7, -0.05, 0.04, 1.0]])
    expected = [127.0, 0.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 12.7, 0.0, 0.0, 1.0]
    np.testing.assert_allclose(ops.round_to_int8(rows, 4)[0], expected, atol=1e-6)
    rows[0, 5] = np.inf
    assert list(np.isnan(ops.round_to_int8(rows, 4)[0])) == [False] * 4 + [True] * 4 + [False] * 4


def test_bf16_rounding_is_to_nearest_even() -> None:
    rows = np.array([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7, 1 + 2**-8 + 2**-20]], np.float32)
    np.testing.assert_array_equal(
        ops.round_to_bf16(rows, 5)[0], np.array([1, 1, 1 + 2**-6, -1 - 2**-7, 1 + 2**-7], np.float32)
    )
