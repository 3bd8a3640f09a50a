"""Sliding windows: right at every boundary, the same bits in all cuts, nothing read before the window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.backends.base import Runnable
from octavo.backends.reference import ops
from octavo.config import KVDtype
from octavo.exceptions import ModelError
from tests.kernels.kernel_programs import ISAS, Chunk, close_to, cpu, random_weights, reference, step, window_case
from tests.kernels.test_attention import (
    KV_TOLERANCE,
    SHAPES,
    assert_same_bits,
    logits_in_chunks,
    random_table,
    sizes_for,
)
from tests.pairwise import pairwise

WINDOWS = (1, 2, 15, 16, 17, 64, 65, 200, 511, 512, 513, 700, 4096)
LAYERS = (((9, 3, 64), 40), ((4, 1, 16), 513), ((2, 2, 256), 1), ((3, 3, 40), 65))  # shape, window
ROWS = (0, 1, 15, 16, 17, 63, 64, 199, 200, 511, 512, 513, 527, 640, 1023, 1024, 1090)


def test_reference_is_masked_attention() -> None:
    """Beside the plain formula: a token sees itself and the window - 1 tokens before it."""
    rng, length, window = np.random.default_rng(0), 40, 7
    q, k, v = (rng.standard_normal((length, 2 * 8)) for _ in range(3))
    keys, values = k.reshape(length // 8, 8, 2, 8), v.reshape(length // 8, 8, 2, 8)
    table, zeros = np.arange(5, dtype=np.int32)[None], np.zeros(length, np.int32)
    ours = ops.paged_attention(q, keys, values, table, zeros, np.arange(length, dtype=np.int32), 0.3, window)
    q_idx, kv_idx = np.arange(length)[:, None], np.arange(length)[None, :]
    allowed = (kv_idx <= q_idx) & (kv_idx > q_idx - window)
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        scores = np.where(allowed, q[:, part] @ k[:, part].T * 0.3, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights / weights.sum(axis=1, keepdims=True) @ v[:, part]
        np.testing.assert_allclose(ours[:, part], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("window", "isa", "kv"), pairwise(WINDOWS, ISAS, [*KV_TOLERANCE]))
def test_equals_the_float64_reference(window: int, isa: str, kv: KVDtype) -> None:
    case, sizes, rng = window_case(3, 1, 16, [window]), sizes_for(kv=kv), np.random.default_rng(window)
    program = case.program()
    weights = random_weights(program)
    ours, theirs = cpu(program, weights, sizes, isa=isa, threads=2), reference(program, weights, sizes)
    tokens, table = rng.integers(0, case.vocab_size, ROWS[-1] + 1).tolist(), random_table(rng, sizes)
    inputs = step([Chunk(tokens, 0, table)], sizes, logit_rows=ROWS)
    close_to(ours.run(inputs).rows("logits"), theirs.run(inputs).rows("logits"), KV_TOLERANCE[kv])


@pytest.mark.parametrize("shape", [*SHAPES.values(), (4, 1, 256)])
def test_several_windows_in_one_program(shape: tuple[int, int, int]) -> None:
    case, sizes, rng = window_case(*shape, [70, None, 5, 70]), sizes_for(), np.random.default_rng(1)
    program = case.program()
    weights = random_weights(program)
    ours, theirs = cpu(program, weights, sizes, threads=2), reference(program, weights, sizes)
    tokens, table = rng.integers(0, case.vocab_size, 600).tolist(), random_table(rng, sizes)
    inputs = step([Chunk(tokens, 0, table)], sizes, logit_rows=[0, 4, 5, 69, 70, 127, 128, 511, 512, 599], groups=4)
    assert [group.window for group in program.kv_groups] == [70, None, 5, 70]
    close_to(ours.run(inputs).rows("logits"), theirs.run(inputs).rows("logits"), 2e-2)


def logits_with_freed_blocks(
    runnable: Runnable, tokens: Sequence[int], table: list[int], cuts: Sequence[int], window: int
) -> np.ndarray:
    """Like logits_in_chunks, with block 0 in place of the blocks before each step's window."""
    parts, start, sizes = [], 0, sizes_for()
    for cut in (*cuts, len(tokens)):
        freed = max(0, start + 1 - window) // 16
        parts.append(
            runnable.run(step([Chunk(tokens[start:cut], start, [0] * freed + table[freed:])], sizes))
            .rows("logits")
            .copy()
        )
        start = cut
    return np.concatenate(parts)


@pytest.mark.parametrize(("layer", "isa", "kv"), pairwise(LAYERS, ISAS, [*KV_TOLERANCE]))
def test_chunks_agree_bit_for_bit_and_freed_blocks_are_not_read(
    layer: tuple[tuple[int, int, int], int], isa: str, kv: KVDtype
) -> None:
    shape, window = layer
    case, sizes, rng = window_case(*shape, [window]), sizes_for(kv=kv), np.random.default_rng(3)
    program = case.program()
    weights = random_weights(program)
    weights["table"][0].data[0] = np.nan
    length = 1085
    tokens = rng.integers(1, case.vocab_size, length).tolist()
    ways = {
        "chunks of 7": range(7, length, 7),
        "chunks of 64": range(64, length, 64),
        "uneven": [1, 2, 18, 500, 514, 1025],
        "prefill, then decode": [500, *range(1020, length)],
    }
    for threads in (1, 2):
        runnable = cpu(program, weights, sizes, isa=isa, threads=threads)
        runnable.run(step([Chunk([0] * 16, 0, [0])], sizes))  # block 0 holds NaN
        whole = logits_in_chunks(runnable, tokens, random_table(rng, sizes), [], sizes)
        assert np.isfinite(whole).all()
        for cuts in ways.values():
            parts = logits_with_freed_blocks(runnable, tokens, random_table(rng, sizes), list(cuts), window)
            assert_same_bits(parts, whole)


def test_a_window_longer_than_the_sequence_is_none() -> None:
    sizes, rng = sizes_for(), np.random.default_rng(4)
    tokens, table = rng.integers(0, 64, 700).tolist(), random_table(rng, sizes)
    results = []
    for window in (None, 700, 10**6):
        program = window_case(2, 1, 32, [window]).program()
        runnable = cpu(program, random_weights(program), sizes, threads=2)
        results.append(logits_in_chunks(runnable, tokens, table, [300, 699], sizes))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_tokens_is_refused(window: int) -> None:
    with pytest.raises(ModelError, match="window"):
        window_case(1, 1, 16, [window]).program()
