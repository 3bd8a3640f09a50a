"""Programs of a single op for kernel tests, and steps to run them.

A token id picks a row of a random float32 table: that is how an op gets its input. The op's result is the logits, so
its width is the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from octavo.backends.base import Limits, Runnable, StepInputs
from octavo.backends.cpu import _kernels
from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import BackendConfig
from octavo.program import Program, ProgramBuilder, Rope, Value
from octavo.program.passes import Pass
from octavo.program.passes.fuse import fuse
from octavo.quantization.base import Weight, Weights

ISAS = _kernels.usable_isas()


@dataclass(frozen=True)
class OpCase:
    """A program around one op: ``build`` makes the logits. ``tolerance`` is relative to the largest number."""

    build: Callable[[ProgramBuilder], Value]
    vocab_size: int
    tolerance: float
    then: Pass = lambda program: program

    def program(self) -> Program:
        builder = ProgramBuilder(vocab_size=self.vocab_size, max_position=4096)
        return self.then(builder.finish(logits=self.build(builder)))


def rope_of(head_dim: int, pairs: int, factor: float = 1.0) -> Rope:
    return Rope(head_dim, tuple(float(10000.0 ** (-j / pairs)) for j in range(pairs)), factor)


@dataclass(frozen=True)
class Layer:
    """The sizes of an attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def attend(self, b: ProgramBuilder, number: int) -> Value:
        """Over random Q, K and V of its own."""
        widths = self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim
        q, k, v = b.split(b.embed(b.token_ids, f"table{number or ''}", sum(widths)), *widths)
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        return b.attention(q, k, v, layer=number, **heads, window=self.window)


def layers_case(*layers: Layer) -> OpCase:
    """The sum of what ``layers``, of which results are equally wide, make of the same tokens."""

    def build(b: ProgramBuilder) -> Value:
        total, *others = [layer.attend(b, number) for number, layer in enumerate(layers)]
        for other in others:
            total = b.add(total, other)
        return b.rows(total, b.logit_rows)

    return OpCase(build, layers[0].heads * layers[0].value_dim, 2e-2)


def attention_case(heads: int, kv_heads: int, key_dim: int, value_dim: int | None = None) -> OpCase:
    return layers_case(Layer(heads, kv_heads, key_dim, value_dim or key_dim))


def window_case(heads: int, kv_heads: int, head_dim: int, windows: Sequence[int | None]) -> OpCase:
    return layers_case(*(Layer(heads, kv_heads, head_dim, head_dim, window) for window in windows))


def _rope_of_heads(head_dim: int) -> Callable[[ProgramBuilder], Value]:
    def build(b: ProgramBuilder) -> Value:
        q, k = b.embed(b.token_ids, "q", b.vocab_size), b.embed(b.token_ids, "k", b.vocab_size)
        q, k = b.rope(q, k, b.positions, rope_of(head_dim, 10, 1.25))
        return b.rows(b.add(q, k), b.logit_rows)

    return build


def _residual(b: ProgramBuilder) -> Value:
    x = b.embed(b.token_ids, "table", b.vocab_size)
    return b.rows(b.add(x, b.linear(b.rms_norm(x, "norm", 1e-6), "w", b.vocab_size)), b.logit_rows)


def _gated_linear(b: ProgramBuilder) -> Value:
    x = b.rms_norm(b.embed(b.token_ids, "table", b.vocab_size), "norm", 1e-6)
    return b.rows(b.silu_mul(b.linear(x, "w", 2 * b.vocab_size)), b.logit_rows)


def _layer_norm(bias: bool) -> Callable[[ProgramBuilder], Value]:
    def build(b: ProgramBuilder) -> Value:
        x = b.embed(b.token_ids, "t", b.vocab_size)
        return b.rows(
            b.layer_norm(b.add(x, b.embed(b.token_ids, "u", b.vocab_size)), "n", 1e-5, bias=bias), b.logit_rows
        )

    return build


def _grouped_norm(b: ProgramBuilder) -> Value:
    """In the middle of a row, beside columns that must stay."""
    before, x, after = b.split(b.embed(b.token_ids, "t", 3 * b.vocab_size), *[b.vocab_size] * 3)
    x = b.add(b.rms_norm(x, "norm", 1e-5, groups=3), b.add(before, after))
    return b.rows(x, b.logit_rows)


def _add(b: ProgramBuilder) -> Value:
    x, y = b.embed(b.token_ids, "a", b.vocab_size), b.embed(b.token_ids, "b", b.vocab_size)
    return b.rows(b.add(x, b.add(x, y)), b.logit_rows)


def _linear(b: ProgramBuilder) -> Value:
    return b.linear(b.rows(b.embed(b.token_ids, "table", 72), b.logit_rows), "w", b.vocab_size, bias=True)


def _split(b: ProgramBuilder) -> Value:
    _, middle, last = b.split(b.embed(b.token_ids, "table", 2 * b.vocab_size + 3), 3, b.vocab_size, b.vocab_size)
    return b.rows(b.add(middle, last), b.logit_rows)


def _gelu(b: ProgramBuilder, tanh: bool) -> Value:
    return b.gelu(b.embed(b.token_ids, "t", b.vocab_size, scale=4.0), tanh=tanh)


def _soft_cap(b: ProgramBuilder, cap: float) -> Value:
    return b.soft_cap(b.embed(b.token_ids, "t", b.vocab_size), cap)


def _rows_of(op: Callable[[ProgramBuilder], Value]) -> Callable[[ProgramBuilder], Value]:
    return lambda b: b.rows(op(b), b.logit_rows)


CASES: dict[str, list[OpCase]] = {
    "embed": [
        OpCase(_rows_of(lambda b: b.embed(b.token_ids, "table", b.vocab_size)), 70, 0.0),
        OpCase(_rows_of(lambda b: b.embed(b.token_ids, "table", b.vocab_size, scale=25.3)), 70, 1e-6),
    ],
    "linear": [OpCase(_linear, 70, 1e-6), OpCase(_residual, 96, 1e-6)],
    "rms_norm": [
        OpCase(_rows_of(lambda b: b.rms_norm(b.embed(b.token_ids, "t", b.vocab_size), "norm", 1e-5)), width, 1e-6)
        for width in (576, 77)
    ]
    + [OpCase(_grouped_norm, width, 1e-6) for width in (192, 39)],
    "fused_linear": [
        OpCase(_residual, 96, 1e-6, fuse),
        OpCase(_gated_linear, 64, 1e-6, partial(fuse, gated={"w"})),
    ],
    "layer_norm": [OpCase(_layer_norm(bias), width, 1e-6) for width in (384, 77, 9) for bias in (False, True)],
    "gelu": [OpCase(_rows_of(partial(_gelu, tanh=tanh)), width, 1e-6) for width in (96, 75) for tanh in (False, True)],
    "soft_cap": [
        OpCase(_rows_of(partial(_soft_cap, cap=cap)), width, 1e-6) for width in (96, 75) for cap in (0.5, 30.0)
    ],
    "add": [OpCase(_add, 83, 1e-6)],
    "split": [OpCase(_split, 64, 1e-6)],
    "rope": [OpCase(_rope_of_heads(24), 96, 1e-6), OpCase(_rope_of_heads(20), 40, 1e-6)],
    "attention": [
        attention_case(9, 3, 64),
        attention_case(2, 2, 40),
        window_case(4, 1, 32, [5, None]),
        layers_case(Layer(6, 2, 48, 32)),
        layers_case(Layer(4, 1, 24, 47), Layer(4, 4, 66, 47), Layer(4, 2, 16, 47, 9), Layer(4, 4, 32, 47, 9)),
    ],
    "silu_mul": [
        OpCase(_rows_of(lambda b: b.silu_mul(b.embed(b.token_ids, "t", 2 * b.vocab_size))), width, 1e-6)
        for width in (96, 75)
    ],
    "gelu_mul": [
        OpCase(_rows_of(lambda b: b.gelu_mul(b.embed(b.token_ids, "t", 2 * b.vocab_size))), width, 1e-6)
        for width in (96, 75)
    ],
    "rows": [OpCase(lambda b: b.rows(b.embed(b.token_ids, "t", b.vocab_size), b.logit_rows), 67, 0.0)],
}


def random_weights(program: Program, seed: int = 0) -> Weights:
    """Normal float32 numbers for every parameter."""
    rng = np.random.default_rng(seed)
    return {
        name: (Weight("float32", spec.shape, rng.standard_normal(spec.shape).astype(np.float32)),)
        for name, spec in program.weights.items()
    }


def limits(
    *, tokens: int = 64, seqs: int = 64, blocks_per_seq: int = 8, blocks: int = 513, block_size: int = 16
) -> Limits:
    return Limits(tokens, tokens, seqs, blocks_per_seq, blocks, block_size)


def cpu(program: Program, weights: Weights, sizes: Limits, *, isa: str = "", threads: int = 1) -> Runnable:
    return CpuBackend(BackendConfig(threads=threads), isa=isa).prepare(program, weights, for_groups(program, sizes))


def reference(program: Program, weights: Weights, sizes: Limits) -> Runnable:
    return ReferenceBackend(BackendConfig(), np.float64).prepare(program, weights, for_groups(program, sizes))


def for_groups(program: Program, sizes: Limits) -> Limits:
    """``sizes`` with as many blocks for each of the program's KV groups."""
    return replace(sizes, num_blocks=sizes.num_blocks * len(program.kv_groups))


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request, the first at position ``start``; ``blocks`` is its table."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


def step(
    chunks: Sequence[Chunk], sizes: Limits, logit_rows: Sequence[int] | None = None, groups: int = 1
) -> StepInputs:
    """The chunks as one step; logits of every row by default. Each group has blocks of its own (``for_groups``)."""
    tables = np.zeros((len(chunks), sizes.max_blocks_per_seq), np.int32)
    tokens, positions, slots, starts, lengths = [], [], [], [0], []
    for n, chunk in enumerate(chunks):
        tables[n, : len(chunk.blocks)] = chunk.blocks
        places = range(chunk.start, chunk.start + len(chunk.tokens))
        tokens += list(chunk.tokens)
        positions += list(places)
        slots += [chunk.blocks[p // sizes.block_size] * sizes.block_size + p % sizes.block_size for p in places]
        starts.append(len(tokens))
        lengths.append(chunk.start + len(chunk.tokens))
    rows = range(len(tokens)) if logit_rows is None else logit_rows
    shift = np.arange(groups, dtype=np.int32).reshape(-1, 1) * sizes.num_blocks
    tables = (tables + shift[..., None]).reshape(-1, sizes.max_blocks_per_seq)
    all_slots = (np.array(slots) + shift * sizes.block_size).reshape(-1)
    arrays = (np.array(list(a), np.int32) for a in (tokens, positions, all_slots, starts, lengths))
    return StepInputs(*arrays, tables, np.array(list(rows), np.int32))


def close_to(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """The largest difference is at most ``tolerance`` times the largest expected number."""
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())
