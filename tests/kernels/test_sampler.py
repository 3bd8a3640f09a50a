"""The native sampler: the NumPy one is its oracle, and a row's result depends on nothing but the row."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    SAMPLE_ROW,
    BitArray,
    FloatArray,
    SampledRows,
    SampleRows,
)
from octavo.backends.cpu import _kernels
from octavo.backends.sampling import sample_rows, uniform

KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_k": 900, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.5, "min_p": 0.01, "top_k": 40, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.02, "top_p": 0.7},
)


def wanted(count: int, rng: np.random.Generator, **fields: float) -> SampleRows:
    """SAMPLE_ROWs of ``count`` requests, row i of the logits each; kinds in turn where ``fields`` say nothing."""
    rows = np.zeros(count, SAMPLE_ROW)
    rows["seed"], rows["position"] = rng.integers(0, 2**64, count, np.uint64), rng.integers(0, 2000, count)
    rows["sample_index"], rows["logit_row"] = rng.integers(0, 3, count), np.arange(count)
    rows["top_p"] = 1.0
    for name in ("given_token", "adjusted_row", "mask_row", "num_logprobs"):
        rows[name] = -1
    for i in range(count):
        for name, value in (fields or KINDS[i % len(KINDS)]).items():
            rows[name][i] = value
    return rows


def logits_like(count: int, size: int, rng: np.random.Generator) -> FloatArray:
    """Some peaked, some nearly flat, some with many equal values."""
    rows = rng.standard_normal((count, size)).astype(np.float32) * rng.choice([0.3, 2.0, 6.0], (count, 1))
    rows[::7] = rows[::7].round(1)
    return np.ascontiguousarray(rows, np.float32)


def native(
    logits: FloatArray,
    rows: SampleRows,
    adjusted: FloatArray | None = None,
    masks: BitArray | None = None,
    *,
    isa: str = "",
    threads: int = 1,
) -> SampledRows:
    out = SampledRows.empty(rows)
    sampler = _kernels.Sampler(_kernels.ThreadPool(threads), isa)
    sampler.sample(
        logits, adjusted, masks, rows.view(np.uint8), out.token_ids, out.ranks, out.logprob_ids, out.logprobs
    )
    return out


def bits(out: SampledRows, i: int, rows: SampleRows) -> tuple[int, bytes, bytes, int]:
    k = int(rows["num_logprobs"][i]) + 1
    rank = int(out.ranks[i]) if k else 0
    return int(out.token_ids[i]), out.logprob_ids[i, :k].tobytes(), out.logprobs[i, :k].tobytes(), rank


@pytest.mark.parametrize("isa", _kernels.usable_isas())
def test_tokens_are_those_of_the_numpy_sampler(isa):
    """3000 rows of all kinds. The two exponentials differ in the last bits, so a draw that falls on the border of two
    tokens, about one in 50,000, may go to either; this fixed set has none."""
    rng = np.random.default_rng(1)
    for size, count in ((997, 2000), (16, 500), (49_152, 500)):
        logits, rows = logits_like(count, size, rng), wanted(count, rng)
        rows["top_k"] = np.minimum(rows["top_k"], size)
        np.testing.assert_array_equal(
            native(logits, rows, isa=isa).token_ids, sample_rows(logits, rows, None, None).token_ids
        )


@pytest.mark.parametrize("isa", _kernels.usable_isas())
def test_logprobs_and_ranks_are_those_of_the_numpy_sampler(isa):
    rng = np.random.default_rng(2)
    logits, rows = logits_like(200, 4099, rng), wanted(200, rng)
    rows["num_logprobs"] = rng.choice([-1, 0, 1, 5, 20, 4099], 200)
    rows["given_token"][::3] = rng.integers(0, 4099, rows["given_token"][::3].size)
    got, expected = native(logits, rows, isa=isa), sample_rows(logits, rows, None, None)
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    for i, k in enumerate(rows["num_logprobs"].tolist()):
        if k >= 0:
            assert got.ranks[i] == expected.ranks[i]
            np.testing.assert_array_equal(got.logprob_ids[i, : k + 1], expected.logprob_ids[i, : k + 1])
            np.testing.assert_allclose(got.logprobs[i, : k + 1], expected.logprobs[i, : k + 1], atol=2e-6)


@pytest.mark.parametrize("isa", _kernels.usable_isas())
def test_a_row_is_the_same_alone_in_any_batch_and_on_any_threads(isa):
    rng = np.random.default_rng(3)
    logits, rows = logits_like(60, 4099, rng), wanted(60, rng)
    rows["num_logprobs"] = rng.choice([-1, 0, 5], 60)
    alone = []
    for i in range(60):
        one = rows[i : i + 1].copy()
        one["logit_row"] = 0
        alone.append(bits(native(logits[i : i + 1], one, isa=isa), 0, one))
    for threads in (1, 2, 5):
        order = rng.permutation(60)
        shuffled = rows[order]
        out = native(logits, shuffled, isa=isa, threads=threads)
        assert [bits(out, i, shuffled) for i in range(60)] == [alone[j] for j in order]


def test_uniform_is_numpys_philox_to_the_bit():
    rng = np.random.default_rng(4)
    edges = (0, 1, 2**63, 2**64 - 1)
    keys = [(s, i, p) for s in edges for i in (0, 1, 7) for p in (0, 5, 2**64 - 1)]
    keys += rng.integers(0, 2**64, (300, 3), np.uint64).tolist()
    for key in keys:
        assert _kernels.uniform(*key) == uniform(*key)


@pytest.mark.parametrize("isa", _kernels.usable_isas())
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 65, 255, 256, 257, 700])
def test_the_end_of_a_row_is_sampled_too(isa, size):
    """Ragged ends: the only likely token is the last one, in every kind of sampling."""
    rng = np.random.default_rng(size)
    logits = np.zeros((len(KINDS), size), np.float32)
    logits[:, -1] = 80.0
    rows = wanted(len(KINDS), rng)
    rows["top_k"], rows["num_logprobs"] = np.minimum(rows["top_k"], size), min(size, 2)
    out = native(logits, rows, isa=isa)
    assert out.token_ids.tolist() == [size - 1] * len(KINDS)
    assert (out.ranks == 1).all()
    np.testing.assert_allclose(out.logprobs[:, 0], 0.0, atol=1e-6)


@pytest.mark.parametrize("isa", _kernels.usable_isas())
def test_excluded_tokens_are_never_drawn(isa):
    rng = np.random.default_rng(5)
    logits = logits_like(1, 700, rng)
    adjusted = np.full((1, 700), -np.inf, np.float32)
    adjusted[0, [3, 650]] = (0.0, 0.1)
    for kind in KINDS:
        rows = wanted(300, rng, **kind)
        rows["logit_row"], rows["adjusted_row"], rows["num_logprobs"] = 0, 0, 1
        out = native(logits, rows, adjusted, isa=isa)
        assert set(out.token_ids.tolist()) <= {3, 650}
        assert (out.logprob_ids[:, 1] == logits[0].argmax()).all()  # logprobs are of the logits themselves
        np.testing.assert_array_equal(out.token_ids, sample_rows(logits, rows, adjusted, None).token_ids)


@pytest.mark.parametrize("isa", _kernels.usable_isas())
@pytest.mark.parametrize("size", [1, 31, 32, 33, 700, 4099])
def test_a_mask_is_what_minus_infinity_is(isa, size):
    """Masked rows, of the logits or of adjusted ones, against rows that hold -inf in the places without a bit."""
    rng = np.random.default_rng(size)
    count = 60
    logits, other = logits_like(count, size, rng), logits_like(count, size, rng)
    other[:, rng.integers(0, size, size // 3)] = -np.inf
    allowed = rng.random((count, -(-size // 32) * 32)) < rng.choice([0.01, 0.5, 1.0], (count, 1))
    allowed[np.arange(count), other.argmax(axis=1)] = True  # something is left
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    rows = wanted(count, rng)
    rows["top_k"], rows["num_logprobs"] = np.minimum(rows["top_k"], size), min(size, 3)
    rows["adjusted_row"] = np.where(np.arange(count) % 2, np.arange(count), -1)
    rows["mask_row"] = np.arange(count)[::-1]
    base = np.where(rows["adjusted_row"][:, None] < 0, logits, other)
    explicit = rows.copy()
    explicit["mask_row"], explicit["adjusted_row"] = -1, np.arange(count)
    expected = np.where(allowed[::-1, :size], base, np.float32(-np.inf))
    empty = ~np.isfinite(expected.max(axis=1))
    got, plain = native(logits, rows, other, masks, isa=isa), native(logits, explicit, expected, isa=isa)
    assert [bits(got, i, rows) for i in np.flatnonzero(~empty)] == [
        bits(plain, i, rows) for i in np.flatnonzero(~empty)
    ]
    assert (got.token_ids[empty] == NOTHING_ALLOWED).all()
    np.testing.assert_array_equal(got.token_ids, sample_rows(logits, rows, other, masks).token_ids)


@pytest.mark.parametrize("isa", _kernels.usable_isas())
def test_a_mask_without_a_bit_leaves_nothing(isa):
    rng = np.random.default_rng(6)
    logits, rows, masks = logits_like(4, 70, rng), wanted(4, rng), np.zeros((1, 3), np.uint32)
    rows["mask_row"], logits[3, 7] = [-1, 0, 0, 0], np.nan
    for out in (native(logits, rows, None, masks, isa=isa), sample_rows(logits, rows, None, masks)):
        assert out.token_ids[0] >= 0
        assert out.token_ids[1:].tolist() == [NOTHING_ALLOWED, NOTHING_ALLOWED, NOT_FINITE]
    with pytest.raises(ValueError, match="too narrow"):
        native(logits, rows, None, masks[:, :2].copy(), isa=isa)
    rows["mask_row"][1] = 1
    with pytest.raises(ValueError, match="points outside"):
        native(logits, rows, None, masks, isa=isa)


@pytest.mark.parametrize("isa", _kernels.usable_isas())
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 40, 698, 699])
def test_rows_that_are_not_finite_are_told_apart(isa, value, place):
    rng = np.random.default_rng(6)
    logits, rows = logits_like(3, 700, rng), wanted(3, rng)
    good = native(logits, rows, isa=isa).token_ids.tolist()
    logits[1, place] = value
    assert native(logits, rows, isa=isa).token_ids.tolist() == [good[0], -1, good[2]]


@pytest.mark.parametrize(
    "fields", [{"logit_row": 2}, {"logit_row": -1}, {"adjusted_row": 0}, {"given_token": 8}, {"temperature": np.nan}]
)
def test_rows_that_point_outside_are_refused(fields):
    rng = np.random.default_rng(7)
    logits, rows = logits_like(2, 8, rng), wanted(1, rng)
    for name, value in fields.items():
        rows[name] = value
    with pytest.raises(ValueError, match="points outside"):
        native(logits, rows)
