"""Packed linears of every format and instruction set, by themselves: right values, and rows that never meet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.backends.cpu import _kernels
from octavo.quantization.base import Weight
from tests.kernels.linear_cases import (
    CASES,
    FLOAT_CASES,
    GROUP_CASES,
    Case,
    group_linear,
    probe,
    quantize_activations,
    round_to_bf16,
)
from tests.pairwise import pairwise

ISAS = _kernels.usable_isas()
OUTPUTS = [1, 31, 33, 96]
ROWS = [1, 2, 3, 7, 8, 13, 65]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def activations(rng: np.random.Generator, m: int, k: int) -> np.ndarray:
    """Rows of very different sizes, with some zeros."""
    x = rng.standard_normal((m, k), dtype=np.float32) * np.float32(10.0) ** rng.integers(-3, 4, (m, 1))
    return (x * (rng.random((m, k)) > 0.1)).astype(np.float32)


def assert_is_arithmetic(isa: str, weight: Weight, x: np.ndarray, y: np.ndarray) -> None:
    """Fused multiply-adds give the emulation's bits; the portable kernels round products and sums apart."""
    expected = group_linear(weight, x)
    if isa != "portable":
        np.testing.assert_array_equal(y, expected)
        return
    size = np.abs(x) @ np.abs(weight.dequantize()).T + np.abs(x).max(axis=1, keepdims=True)
    assert np.all(np.abs(y - expected) <= 3e-7 * size)


def names(case: Case) -> str:
    return case.name


def sizes(cases: list[Case], inputs: list[int], outputs: list[int]) -> list[object]:
    """Every case with every number of inputs that its groups divide, on every ISA, and with every number of outputs.

    But not all three together: all formats share the loop over outputs of an ISA, so pairs are what can break.
    """
    fitting = [(case, k) for case in cases for k in inputs if case.fits(k)]
    return [
        pytest.param(isa, case, n, k, id=f"{case.name}-{k}-{n}-{isa}")
        for (case, k), n, isa in pairwise(fitting, outputs, ISAS)
    ]


def test_portable_kernels_are_always_there() -> None:
    assert "portable" in ISAS


@pytest.mark.parametrize(("isa", "case", "n", "k"), sizes(FLOAT_CASES, [1, 31, 32, 101], OUTPUTS))
def test_float_formats_match_float64(isa: str, case: Case, n: int, k: int, rng: np.random.Generator) -> None:
    weight = case.make(rng, n, k)
    linear = probe(isa, weight)
    w = weight.dequantize().astype(np.float64)
    for m in ROWS:
        x = activations(rng, m, k)
        seen = (x if case.format == "float32" else round_to_bf16(x)).astype(np.float64)
        bound = np.abs(seen) @ np.abs(w).T * 2e-7 * np.sqrt(k) + 1e-30
        assert np.all(np.abs(linear.run(x) - seen @ w.T) <= bound)


@pytest.mark.parametrize(("isa", "case", "n", "k"), sizes(GROUP_CASES, [32, 48, 192, 512], OUTPUTS))
def test_group_formats_are_their_arithmetic(isa: str, case: Case, n: int, k: int, rng: np.random.Generator) -> None:
    weight = case.make(rng, n, k)
    linear = probe(isa, weight)
    for m in ROWS:
        x = activations(rng, m, k)
        assert_is_arithmetic(isa, weight, x, linear.run(x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=names)
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (1536, 768)])
def test_shapes_of_a_real_model(isa: str, case: Case, n: int, k: int, rng: np.random.Generator) -> None:
    weight, x = case.make(rng, n, k), activations(rng, 14, k)
    y = probe(isa, weight, threads=2).run(x)
    if case.group:
        assert_is_arithmetic(isa, weight, x, y)
    else:
        w = weight.dequantize().astype(np.float64)
        seen = (x if case.format == "float32" else round_to_bf16(x)).astype(np.float64)
        assert np.all(np.abs(y - seen @ w.T) <= np.abs(seen) @ np.abs(w).T * 2e-7 * np.sqrt(k))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", GROUP_CASES, ids=names)
def test_group_formats_are_close_to_float64(isa: str, case: Case, rng: np.random.Generator) -> None:
    """Each input is off by at most half a step of its row, and the errors are independent."""
    weight = case.make(rng, 64, 1520 if case.fits(1520) else 1536)
    x = activations(rng, 9, weight.shape[1])
    w = weight.dequantize().astype(np.float64)
    _, scale = quantize_activations(x)
    step = np.broadcast_to(scale[:, None], x.shape).astype(np.float64)
    deviation = np.sqrt((step**2 / 12) @ (w**2).T)
    error = np.abs(probe(isa, weight).run(x) - x.astype(np.float64) @ w.T)
    assert np.all(error <= 5 * deviation)
    assert np.all(error <= (step / 2) @ np.abs(w).T * 1.001)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=names)
def test_rows_are_independent_bit_for_bit(isa: str, case: Case, rng: np.random.Generator) -> None:
    """A row alone, anywhere in batches of any size, on one and on two threads."""
    k = 192 if case.fits(192) else 256
    weight = case.make(rng, 97, k)
    linears = [probe(isa, weight, threads=threads) for threads in (1, 2)]
    x = activations(rng, 65, k)
    alone = np.concatenate([linears[0].run(x[i : i + 1]) for i in range(len(x))])
    for linear in linears:
        for m in (1, 2, 3, 5, 7, 8, 13, 24, 64, 65):
            for start in {0, 1, len(x) - m} & set(range(len(x) - m + 1)):
                np.testing.assert_array_equal(linear.run(x[start : start + m]), alone[start : start + m])
        order = rng.permutation(len(x))
        np.testing.assert_array_equal(linear.run(np.ascontiguousarray(x[order])), alone[order])


@pytest.mark.parametrize("case", GROUP_CASES, ids=names)
def test_vector_instruction_sets_agree_bit_for_bit(case: Case, rng: np.random.Generator) -> None:
    """Integer dots are exact and the float operations are the same fused ones."""
    k = 192 if case.fits(192) else 256
    weight, x = case.make(rng, 64, k), activations(rng, 5, k)
    results = [probe(isa, weight).run(x) for isa in ISAS if isa != "portable"]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_parts_of_different_formats(isa: str, threads: int, rng: np.random.Generator) -> None:
    """A fused matrix: outputs of a part are what the part alone gives; bias and residual are added in this order."""
    weights = [case.make(rng, int(n), 256) for case, n in zip(CASES, rng.integers(1, 97, len(CASES)))]
    x = activations(rng, 15, 256)
    parts = np.concatenate([probe(isa, weight).run(x) for weight in weights], axis=1)
    linear = probe(isa, *weights, threads=threads)
    np.testing.assert_array_equal(linear.run(x), parts)
    bias = rng.standard_normal(parts.shape[1], dtype=np.float32)
    residual = rng.standard_normal(parts.shape, dtype=np.float32)
    np.testing.assert_array_equal(linear.run(x, bias), parts + bias)
    np.testing.assert_array_equal(linear.run(x, None, residual), parts + residual)
    np.testing.assert_array_equal(linear.run(x, bias, residual), parts + bias + residual)


@pytest.mark.parametrize(("isa", "case", "n", "k"), sizes(CASES, [64, 192, 48, 51, 512], [1, 33, 96]))
def test_embedding_rows_are_the_stored_values(isa: str, case: Case, n: int, k: int, rng: np.random.Generator) -> None:
    """Also the round trip of packing: every weight comes back, exactly."""
    first, second = case.make(rng, n, k), case.make(rng, 2 * n, k)
    stored = np.concatenate([first.dequantize(), second.dequantize()])
    ids = rng.permutation(3 * n).astype(np.int32)
    np.testing.assert_array_equal(probe(isa, first, second).embed(ids), stored[ids])


@pytest.mark.parametrize("isa", ISAS)
def test_half_scales_come_back_exactly(isa: str) -> None:
    """Every finite float16, subnormals and both zeros too, as scale and as minimum."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.concatenate([halves[np.isfinite(halves)], np.zeros(2048, np.float16)])
    scale = halves.reshape(-1, 32)
    data = np.full((len(scale), 32 * 16), 0x11, np.uint8)  # every code is 1
    weight = Weight("int4_group", (len(scale), 1024), data, scale, scale[:, ::-1].copy(), 32, bits=4)
    rows = probe(isa, weight).embed(np.arange(len(scale), dtype=np.int32))
    np.testing.assert_array_equal(rows, weight.dequantize())


@pytest.mark.parametrize(("isa", "case", "poison"), pairwise(ISAS, CASES, [np.nan, np.inf, -np.inf]))
def test_a_bad_row_fails_alone(isa: str, case: Case, poison: float, rng: np.random.Generator) -> None:
    """NaN and infinity reach every output of their row, so that a sampler can see them, and no other row."""
    weight = case.make(rng, 40, 256)
    linear = probe(isa, weight)
    x = activations(rng, 9, 256)
    clean = linear.run(x)
    x[4, 70] = poison
    dirty = linear.run(x)
    assert not np.isfinite(dirty[4]).any()
    np.testing.assert_array_equal(np.delete(dirty, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", GROUP_CASES, ids=names)
def test_extreme_codes_and_tiny_rows(isa: str, case: Case, rng: np.random.Generator) -> None:
    """The largest products at once (no saturation anywhere), rows of zeros, and numbers next to underflow."""
    k = 64 if case.fits(64) else 256
    weight = case.make(rng, 32, k)
    extreme = {4: 255, 5: 31, 6: 63, 8: -128}[case.bits]
    weight = replace(weight, data=np.full_like(weight.data, extreme))
    x = np.stack([np.full(k, 3.0), np.full(k, -3.0), np.zeros(k), np.full(k, 1e-38), np.full(k, 1e-30)])
    x = x.astype(np.float32)
    result = probe(isa, weight).run(x)
    error = np.abs(result - group_linear(weight, x)).max(axis=1)
    assert np.all(error <= 1e-5 * np.abs(x).sum(axis=1))
    np.testing.assert_array_equal(result[2:4], 0.0)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_packed_size(case: Case, rng: np.random.Generator) -> None:
    """Panels hold the codes, of as many bits as they need, and scales; blocks are whole cache lines."""
    n, k = 64, 256
    weight = case.make(rng, n, k)
    if not case.group:
        assert probe("", weight).packed_bytes == weight.num_bytes
        return
    kinds = 2 if case.minimum else 1
    scales = 32 // min(case.group, 32) * kinds * np.dtype(case.scales).itemsize  # of 32 inputs of one output
    block = -(-32 * (4 * case.bits + scales) // 64) * 64
    units = 2 * n * kinds if case.scales == "int8" else 0
    assert probe("", weight).packed_bytes == n // 32 * k // 32 * block + units
