"""Paged attention: right at every boundary, the same bits however a sequence was cut into steps; all types of KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.backends.base import Limits, Runnable
from octavo.config import KVDtype
from octavo.exceptions import KernelError
from tests.kernels.kernel_programs import (
    ISAS,
    Chunk,
    attention_case,
    close_to,
    cpu,
    limits,
    random_weights,
    reference,
    step,
)
from tests.pairwise import pairwise

SHAPES = {
    "gqa": (9, 3, 64),
    "mqa": (4, 1, 16),
    "mha": (3, 3, 40),
    "wide": (4, 2, 128),
    "large-group": (64, 1, 4),
}
UNEQUAL = {"narrow values": (6, 2, 48, 20), "wide values": (4, 2, 16, 80)}  # of keys and of values
# Against the same rounding of K and V; then int8 meets int16, everything else bfloat16
KV_TOLERANCE: dict[KVDtype, float] = {"bfloat16": 2e-2, "int8": 1e-4, "fp8_e4m3": 2e-2, "fp8_e5m2": 2e-2}
GRID = pairwise([*SHAPES.values(), *UNEQUAL.values()], ISAS, [*KV_TOLERANCE])
BOUNDARIES = (1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1025)


def sizes_for(block_size: int = 16, tokens: int = 1100, kv: KVDtype = "auto") -> Limits:
    blocks = 1200 // block_size
    sizes = limits(tokens=tokens, seqs=16, blocks_per_seq=blocks, blocks=4 * blocks, block_size=block_size)
    return dataclasses.replace(sizes, kv_dtype=kv)


def random_table(rng: np.random.Generator, sizes: Limits) -> list[int]:
    return [int(b) for b in rng.permutation(np.arange(1, sizes.num_blocks))[: sizes.max_blocks_per_seq]]


def logits_in_chunks(runnable: Runnable, tokens: Sequence[int], table: list[int], cuts: Sequence[int], sizes: Limits):  # type: ignore[no-untyped-def]
    """Logits of all tokens, computed in steps that end at ``cuts``."""
    parts, start = [], 0
    for cut in (*cuts, len(tokens)):
        parts.append(runnable.run(step([Chunk(tokens[start:cut], start, table)], sizes)).rows("logits").copy())
        start = cut
    return np.concatenate(parts)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize(("shape", "isa", "kv"), GRID)
def test_equals_the_float64_reference_around_boundaries(shape: tuple[int, ...], isa: str, kv: KVDtype) -> None:
    case, sizes, rng = attention_case(*shape), sizes_for(kv=kv), np.random.default_rng(2)
    program = case.program()
    weights = random_weights(program)
    ours, theirs = cpu(program, weights, sizes, isa=isa, threads=2), reference(program, weights, sizes)
    tokens, table = rng.integers(0, case.vocab_size, 1025).tolist(), random_table(rng, sizes)
    inputs = step([Chunk(tokens, 0, table)], sizes, logit_rows=[n - 1 for n in BOUNDARIES])
    close_to(ours.run(inputs).rows("logits"), theirs.run(inputs).rows("logits"), KV_TOLERANCE[kv])


@pytest.mark.parametrize(("shape", "isa", "kv"), GRID)
def test_decode_prefill_and_chunks_agree_bit_for_bit(shape: tuple[int, ...], isa: str, kv: KVDtype) -> None:
    case, sizes, rng = attention_case(*shape), sizes_for(kv=kv), np.random.default_rng(3)
    program = case.program()
    weights = random_weights(program)
    one, two = (cpu(program, weights, sizes, isa=isa, threads=threads) for threads in (1, 2))
    length = 531
    tokens = rng.integers(0, case.vocab_size, length).tolist()
    whole = logits_in_chunks(one, tokens, random_table(rng, sizes), [], sizes)
    for runnable in (one, two):
        ways = {
            "whole": [],
            "chunks of 7": range(7, length, 7),
            "chunks of 64": range(64, length, 64),
            "uneven": [1, 2, 18, 500, 514],
            "prefill, then decode": range(505, length),
        }
        for cuts in ways.values():
            assert_same_bits(logits_in_chunks(runnable, tokens, random_table(rng, sizes), list(cuts), sizes), whole)


@pytest.mark.parametrize("kv", KV_TOLERANCE)
@pytest.mark.parametrize("isa", ISAS)
def test_a_request_is_the_same_alone_and_in_a_mixed_step(isa: str, kv: KVDtype) -> None:
    case, sizes, rng = attention_case(9, 3, 64), sizes_for(kv=kv), np.random.default_rng(4)
    program = case.program()
    weights = random_weights(program)
    runnable = cpu(program, weights, sizes, isa=isa, threads=2)
    blocks = iter(rng.permutation(np.arange(1, sizes.num_blocks)).tolist())
    requests = [
        (rng.integers(0, case.vocab_size, length).tolist(), [next(blocks) for _ in range(-(-length // 16))], known)
        for length, known in ((1050, 1049), (600, 590), (40, 0), (1, 0), (517, 300))
    ]
    alone = [logits_in_chunks(runnable, tokens, table, [known], sizes)[known:] for tokens, table, known in requests]
    chunks = [Chunk(tokens[known:], known, table) for tokens, table, known in requests]
    assert_same_bits(runnable.run(step(chunks, sizes)).rows("logits"), np.concatenate(alone))


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_size_does_not_matter(block_size: int) -> None:
    case, rng = attention_case(9, 3, 64), np.random.default_rng(5)
    program = case.program()
    weights = random_weights(program)
    tokens = rng.integers(0, case.vocab_size, 140).tolist()
    results = []
    for sizes in (sizes_for(16), sizes_for(block_size)):
        runnable = cpu(program, weights, sizes, threads=2)
        results.append(logits_in_chunks(runnable, tokens, random_table(rng, sizes), [50, 139], sizes))
    assert_same_bits(*results)


@pytest.mark.parametrize("kv", KV_TOLERANCE)
@pytest.mark.parametrize("isa", ISAS)
def test_nan_left_in_a_block_does_not_reach_its_next_owner(isa: str, kv: KVDtype) -> None:
    case, sizes = attention_case(9, 3, 64), sizes_for(kv=kv)
    program = case.program()
    weights = random_weights(program)
    weights["table"][0].data[0] = np.nan
    runnable = cpu(program, weights, sizes, isa=isa)
    assert np.isnan(runnable.run(step([Chunk([0] * 32, 0, [5, 6])], sizes)).rows("logits")).all()
    healthy = (
        runnable.run(step([Chunk([1, 2, 3], 0, [5]), Chunk(range(1, 20), 0, [7, 6])], sizes)).rows("logits").copy()
    )
    fresh = cpu(program, weights, sizes, isa=isa)
    assert np.isfinite(healthy).all()
    assert_same_bits(
        healthy, fresh.run(step([Chunk([1, 2, 3], 0, [8]), Chunk(range(1, 20), 0, [9, 10])], sizes)).rows("logits")
    )


@pytest.mark.parametrize("kv", KV_TOLERANCE)
def test_nan_of_one_request_stays_with_it(kv: KVDtype) -> None:
    case, sizes = attention_case(4, 2, 32), sizes_for(kv=kv)
    program = case.program()
    weights = random_weights(program)
    weights["table"][0].data[0] = np.nan
    logits = (
        cpu(program, weights, sizes).run(step([Chunk([0, 1], 0, [1]), Chunk([1, 2], 0, [2])], sizes)).rows("logits")
    )
    np.testing.assert_array_equal(np.isnan(logits).all(axis=1), [True, True, False, False])


@pytest.mark.parametrize("kv", KV_TOLERANCE)
def test_copied_blocks_read_the_same(kv: KVDtype) -> None:
    case, sizes, rng = attention_case(9, 3, 64), sizes_for(kv=kv), np.random.default_rng(6)
    program = case.program()
    runnable = cpu(program, random_weights(program), sizes)
    tokens = rng.integers(0, case.vocab_size, 40).tolist()
    runnable.run(step([Chunk(tokens[:39], 0, [1, 2, 3])], sizes))
    original = runnable.run(step([Chunk(tokens[39:], 39, [1, 2, 3])], sizes)).rows("logits").copy()
    runnable.copy_blocks([(1, 11), (2, 12), (3, 13), (12, 22)])
    runnable.run(step([Chunk(tokens[1:34], 0, [1, 2, 3])], sizes))  # overwrites the originals
    assert_same_bits(runnable.run(step([Chunk(tokens[39:], 39, [11, 22, 13])], sizes)).rows("logits"), original)


@pytest.mark.parametrize("kv", [kv for kv in KV_TOLERANCE if kv != "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_scaled_zeros_huge_and_tiny_heads(isa: str, kv: KVDtype) -> None:
    case, sizes = attention_case(2, 2, 16), sizes_for(kv=kv)
    program = case.program()
    weights = random_weights(program)
    table = weights["table"][0].data
    table[1, 32:] = 0.0  # K and V
    table[2, 64:] *= np.float32(1e30)  # V
    table[3, 64:] *= np.float32(1e-35)
    table[4, 64:] = np.float32(1e-45)  # its scale is zero
    tokens, rows = [0, 1, 2, 0, 3, 4, 1], [0, 1, 2]
    inputs = step([Chunk(tokens, 0, [1]), Chunk([1, 3, 4], 0, [2])], sizes, logit_rows=[*rows, 7, 8, 9])
    ours, theirs = (
        make(program, weights, sizes).run(inputs).rows("logits") for make in (lambda *a: cpu(*a, isa=isa), reference)
    )
    assert np.isfinite(ours).all()
    close_to(ours[:2], theirs[:2], KV_TOLERANCE[kv])
    close_to(ours[2:3], theirs[2:3], KV_TOLERANCE[kv])
    np.testing.assert_array_equal(ours[3], 0.0)


def test_int8_refuses_heads_whose_sums_could_overflow() -> None:
    program = attention_case(1, 1, 528).program()
    with pytest.raises(KernelError, match="layer 0: keys of 528"):
        cpu(program, random_weights(program), sizes_for(kv="int8"))
    cpu(program, random_weights(program), sizes_for())


@pytest.mark.parametrize("isa", ISAS)
def test_int8_sums_of_the_longest_head_do_not_overflow(isa: str) -> None:
    case, sizes = attention_case(1, 1, 512), sizes_for(kv="int8")
    program = case.program()
    weights = random_weights(program)
    weights["table"][0].data[:, :1024] = 1.0  # every product of a score is the greatest there is
    inputs = step([Chunk(range(40), 0, [1, 2, 3])], sizes)
    ours, theirs = (
        make(program, weights, sizes).run(inputs).rows("logits") for make in (lambda *a: cpu(*a, isa=isa), reference)
    )
    close_to(ours, theirs, 1e-4)
