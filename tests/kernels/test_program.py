"""Whole programs on the CPU backend: a tiny model, refused steps, memory, threads."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends.base import SAMPLE_ROW, Limits, StepInputs
from octavo.backends.cpu import _kernels
from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.cpu.buffers import Buffer, plan_arena
from octavo.backends.cpu.lowering import lower
from octavo.config import BackendConfig
from octavo.exceptions import KernelError, ModelError
from octavo.program import OPS, Program, ProgramBuilder
from octavo.program.passes.fuse import fuse, gate_matrices
from octavo.program.passes.outputs import keep_outputs
from octavo.quantization.base import Weight, Weights
from tests.kernels.kernel_programs import (
    ISAS,
    Chunk,
    close_to,
    cpu,
    limits,
    random_weights,
    reference,
    rope_of,
    step,
)
from tests.kernels.test_sampler import bits, native, wanted

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 96, 6, 2, 16, 160, 300


def tiny_model(head: str = "embed", *, hidden: bool = False) -> Program:
    """Two pre-norm layers with GQA, QKV bias and SwiGLU; tied embeddings by default."""
    b = ProgramBuilder(vocab_size=VOCAB, max_position=1024)
    rope, q_size, kv_size = rope_of(HEAD_DIM, HEAD_DIM // 2), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    x = b.embed(b.token_ids, "embed", HIDDEN)
    for layer in range(2):
        h = b.rms_norm(x, f"{layer}.norm1", 1e-5)
        q, k, v = b.split(b.linear(h, f"{layer}.qkv", q_size + 2 * kv_size, bias=True), q_size, kv_size, kv_size)
        q, k = b.rope(q, k, b.positions, rope)
        a = b.attention(q, k, v, layer=layer, num_heads=HEADS, num_kv_heads=KV_HEADS)
        x = b.add(x, b.linear(a, f"{layer}.o", HIDDEN))
        h = b.rms_norm(x, f"{layer}.norm2", 1e-5)
        x = b.add(x, b.linear(b.silu_mul(b.linear(h, f"{layer}.gate_up", 2 * INNER)), f"{layer}.down", HIDDEN))
    logits = b.linear(b.rms_norm(b.rows(x, b.logit_rows), "norm", 1e-5), head, VOCAB)
    return b.finish(logits=logits, hidden=b.rms_norm(x, "norm", 1e-5) if hidden else None)


def tiny_weights(program: Program) -> Weights:
    """Small enough that attention is not saturated."""
    rng = np.random.default_rng(7)
    return {
        name: (Weight("float32", spec.shape, (0.1 * rng.standard_normal(spec.shape)).astype(np.float32)),)
        for name, spec in program.weights.items()
    }


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_model_equals_the_reference(isa: str) -> None:
    program, sizes = tiny_model(), limits(tokens=128)
    weights, rng = tiny_weights(program), np.random.default_rng(8)
    chunks = [Chunk(rng.integers(0, VOCAB, n).tolist(), 0, range(first, first + 8)) for n, first in ((70, 1), (58, 9))]
    inputs = step(chunks, sizes)
    expected = reference(program, weights, sizes).run(inputs).rows("logits")
    close_to(cpu(program, weights, sizes, isa=isa, threads=2).run(inputs).rows("logits"), expected, 1e-2)


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_model_is_bit_identical_in_any_chunking_batch_and_thread_count(isa: str) -> None:
    program, sizes = tiny_model(), limits(tokens=128)
    weights, rng = tiny_weights(program), np.random.default_rng(9)
    tokens = rng.integers(0, VOCAB, 60).tolist()
    other = Chunk(rng.integers(0, VOCAB, 50).tolist(), 0, range(20, 24))
    runnables = [cpu(program, weights, sizes, isa=isa, threads=threads) for threads in (1, 2, 3)]
    whole = runnables[0].run(step([Chunk(tokens, 0, [1, 2, 3, 4])], sizes)).rows("logits").copy()
    for runnable in runnables:
        for cut in (1, 7, 16, 59):
            runnable.run(step([other, Chunk(tokens[:cut], 0, [9, 8, 7, 6])], sizes))
            rest = runnable.run(step([Chunk(tokens[cut:], cut, [9, 8, 7, 6]), other], sizes)).rows("logits")[
                : len(tokens) - cut
            ]
            np.testing.assert_array_equal(rest.view(np.uint32), whole[cut:].view(np.uint32))


def quantized(rng: np.random.Generator, rows: int, columns: int, bits: int) -> Weight:
    """A part in groups of 32 with scales and minima in half precision."""
    scale = (0.02 * rng.random((rows, columns // 32)) + 0.01).astype(np.float16)
    minimum = (-7.5 * scale.astype(np.float32)).astype(np.float16) if bits == 4 else None
    if bits == 4:
        data = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        return Weight("int4_group", (rows, columns), data, scale, minimum, 32, bits=4)
    data = rng.integers(-100, 100, (rows, columns)).astype(np.int8)
    return Weight("int8_group", (rows, columns), data, (scale / 16).astype(np.float16), None, 32)


@pytest.mark.parametrize("isa", ISAS)
def test_formats_mix_inside_a_matrix_and_tied_embeddings_are_packed_once(isa: str) -> None:
    program, sizes, rng = tiny_model(), limits(tokens=128), np.random.default_rng(11)
    weights = dict(tiny_weights(program))
    bfloat16 = (weights["0.qkv"][0].data[128:].view(np.uint32) >> 16).astype(np.uint16)
    weights["0.qkv"] = (
        quantized(rng, 96, HIDDEN, 4),
        quantized(rng, 32, HIDDEN, 8),
        Weight("bfloat16", (32, HIDDEN), bfloat16),
    )
    weights["embed"] = (quantized(rng, VOCAB - 100, HIDDEN, 8), quantized(rng, 100, HIDDEN, 4))
    inputs = step([Chunk(rng.integers(0, VOCAB, 70).tolist(), 0, range(1, 6))], sizes)
    runnable = cpu(program, weights, sizes, isa=isa, threads=2)
    close_to(runnable.run(inputs).rows("logits"), reference(program, weights, sizes).run(inputs).rows("logits"), 3e-2)
    untied = {**weights, "lm_head": (*weights["embed"],)}
    table_bytes = sum(part.num_bytes for part in weights["embed"])
    assert cpu(tiny_model("lm_head"), untied, sizes, isa=isa).weight_bytes >= runnable.weight_bytes + table_bytes


@pytest.mark.parametrize("gated", [False, True])
def test_fused_ops_compute_the_same_bits(gated: bool) -> None:
    program, sizes = tiny_model(), limits()
    fused = fuse(program, gated=gate_matrices(program) if gated else ())
    for op in fused.ops:
        weights = {parameter: program.weights[name] for parameter, name in op.weights.items()}
        shapes = OPS[op.kind].infer(dict(zip(OPS[op.kind].inputs, op.inputs)), weights, op.attrs)
        assert shapes == tuple(value.shape for value in op.outputs)
    weights, inputs = tiny_weights(program), good_step(sizes)
    ours, theirs = (reference(one, weights, sizes).run(inputs).rows("logits") for one in (fused, program))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
def test_hidden_rows_are_those_of_the_reference_and_leave_the_logits_alone(isa: str) -> None:
    program, sizes = tiny_model(hidden=True), limits()
    weights, inputs = tiny_weights(program), step([Chunk(range(40), 0, [1, 2, 3])], limits(), logit_rows=[39, 3])
    ours, theirs = (
        cpu(program, weights, sizes, isa=isa, threads=2).run(inputs),
        reference(program, weights, sizes).run(inputs),
    )
    assert theirs.rows("hidden").shape == (40, HIDDEN)
    close_to(ours.rows("hidden"), theirs.rows("hidden"), 1e-2)
    np.testing.assert_array_equal(ours.rows("hidden", np.array([7, 2])), ours.rows("hidden")[[7, 2]])
    logits = ours.rows("logits").copy()
    np.testing.assert_array_equal(logits[1], ours.rows("logits", 1))
    alone = keep_outputs(program)
    assert [op.kind for op in alone.ops] == [op.kind for op in tiny_model().ops]
    np.testing.assert_array_equal(cpu(alone, weights, sizes, isa=isa).run(inputs).rows("logits"), logits)


def test_a_stage_takes_its_own_arguments_alone() -> None:
    program = tiny_model()
    native = cpu(program, tiny_weights(program), limits())._native  # type: ignore[attr-defined]
    native.begin_rows(True)
    place = (0, 16)
    for kind, args, message in (
        ("fft", {}, "no stage 'fft'"),
        ("add", {"a": place, "b": place, "out": place}, "add lacks width"),
        ("add", {"a": place, "b": place, "out": place, "width": 16, "eps": 0.0}, "no room for all its arguments"),
        ("write_kv", {"layer": 2, "k": place, "v": place}, "no layer 2"),
    ):
        with pytest.raises(ValueError, match=message):
            native.add(kind, args)


def test_outputs_that_are_not_there_are_refused() -> None:
    both, sizes = tiny_model(hidden=True), limits()
    with pytest.raises(ModelError, match="no output 'pooled', only logits, hidden"):
        keep_outputs(both, names=["pooled"])
    program = keep_outputs(both, names=["hidden"])
    assert "norm" in program.weights
    weights, inputs = tiny_weights(both), good_step(sizes)
    for outputs in (cpu(program, weights, sizes).run(inputs), reference(program, weights, sizes).run(inputs)):
        assert outputs.rows("hidden").shape == (inputs.token_ids.size, HIDDEN)
        with pytest.raises(KernelError, match="no output 'logits'"):
            outputs.rows("logits")
        with pytest.raises(KernelError, match="no output 'logits'"):
            outputs.sample(np.zeros(1, SAMPLE_ROW), None, None)


def test_linears_take_over_norms_gates_and_residual_adds_and_buffers_are_shared() -> None:
    program, sizes = tiny_model(), limits(tokens=128)
    gates = gate_matrices(program)
    assert gates == {"0.gate_up", "1.gate_up"}
    fused = fuse(program, gated=gates).ops
    linears = [op for op in fused if op.kind == "fused_linear"]
    assert sum(len(op.inputs) == 2 for op in linears) == 4
    assert sum("norm" in op.weights for op in linears) == 5
    assert [op.attrs["gate"] for op in linears] == ["", "", "silu_mul", ""] * 2 + [""]
    assert {"add", "rms_norm", "silu_mul", "linear"}.isdisjoint(op.kind for op in fused)
    assert sum(op.kind == "silu_mul" for op in fuse(program).ops) == 2
    lowered = lower(program, sizes, lambda name, rows: 0, _kernels.Kernels().row_ops, gates)
    widths = [128 * (HIDDEN + 2 * INNER + INNER), 128 * VOCAB]
    assert lowered.arena_floats < 2 * sum(widths)  # far from one buffer per value
    assert [phase.rows for phase in lowered.phases[:4]] == ["T", None, "T", None]


@pytest.mark.parametrize("kind", ["soft_cap", "scale", "no_such_op"])
def test_an_op_without_a_kernel_is_named(kind: str) -> None:
    """Of the table but of no file of kernels, a kernel's name but no op, and neither."""
    b = ProgramBuilder(vocab_size=32, max_position=64)
    x = b.rows(b.soft_cap(b.embed(b.token_ids, "table", 32), 5.0), b.logit_rows)
    program = b.finish(logits=x)
    program = replace(program, ops=tuple(replace(op, kind=kind) if op.kind == "soft_cap" else op for op in program.ops))
    with pytest.raises(KernelError, match=f"no op '{kind}'"):
        lower(program, limits(), lambda name, rows: 0, _kernels.Kernels().row_ops - {"soft_cap"})


def test_what_others_read_too_is_not_melted() -> None:
    b = ProgramBuilder(vocab_size=32, max_position=64)
    x = b.embed(b.token_ids, "table", 32)
    shared = b.rms_norm(x, "norm", 1e-5)
    both = b.linear(shared, "both", 64)
    y = b.add(shared, b.linear(b.silu_mul(both), "down", 32))
    left, _ = b.split(both, 32, 32)
    biased = b.silu_mul(b.linear(y, "biased", 64, bias=True))
    program = b.finish(logits=b.rows(b.add(left, biased), b.logit_rows))
    assert gate_matrices(program) == set()
    fused = [op for op in fuse(program, gated=gate_matrices(program)).ops if op.kind == "fused_linear"]
    assert [(op.weights, len(op.inputs)) for op in fused] == [({"weight": "down"}, 2)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_gates_beside_what_they_gate_change_no_bit(isa: str, parts: int, gate: str) -> None:
    """A linear with a gate in its epilogue against the two apart, which another reader of the linear enforces."""
    rng, sizes = np.random.default_rng(3), limits()
    weight = tuple(quantized(rng, 128 // parts, 64, 4) for _ in range(parts))
    results: list[list[bytes]] = []
    for melted in (True, False):
        b = ProgramBuilder(vocab_size=64, max_position=64)
        both = b.linear(b.rms_norm(b.embed(b.token_ids, "table", 64), "norm", 1e-5), "w", 128)
        if not melted:
            b.split(both, 64, 64)
        program = b.finish(logits=b.rows(getattr(b, gate)(both), b.logit_rows))
        assert gate_matrices(program) == ({"w"} if melted else set())
        for threads in (1, 3):
            runnable = cpu(program, {**random_weights(program), "w": weight}, sizes, isa=isa, threads=threads)
            steps = [step([Chunk(range(tokens), 0, [1, 2, 3])], sizes) for tokens in (1, 3, 40)]
            results.append([runnable.run(inputs).rows("logits").tobytes() for inputs in steps])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_gates_of_another_format_are_left_apart(isa: str) -> None:
    program, sizes, rng = tiny_model(), limits(tokens=128), np.random.default_rng(12)
    weights = dict(tiny_weights(program))
    weights["0.gate_up"] = (quantized(rng, INNER, HIDDEN, 4), quantized(rng, INNER, HIDDEN, 8))
    inputs = step([Chunk(rng.integers(0, VOCAB, 70).tolist(), 0, range(1, 6))], sizes)
    runnable = cpu(program, weights, sizes, isa=isa, threads=2)
    packed = runnable._packed  # type: ignore[attr-defined]
    assert packed.directory.gated(packed.owners) == {"1.gate_up"}
    close_to(runnable.run(inputs).rows("logits"), reference(program, weights, sizes).run(inputs).rows("logits"), 3e-2)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(0, 6)), max_size=30))
def test_buffers_that_live_together_never_overlap(spec: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(floats, 1, first, first + length) for floats, first, length in spec]
    end = plan_arena(buffers)
    for n, a in enumerate(buffers):
        assert a.offset >= 0
        assert a.offset + a.floats <= end
        assert a.offset % 16 == 0
        for b in buffers[:n]:
            together = a.first <= b.last and b.first <= a.last
            assert not together or a.offset + a.floats <= b.offset or b.offset + b.floats <= a.offset


def good_step(sizes: Limits) -> StepInputs:
    return step([Chunk([1, 2, 3], 0, [1]), Chunk([4], 20, [2, 3])], sizes)


def altered(inputs: StepInputs, name: str, index: tuple[int, ...], value: int) -> StepInputs:
    array = getattr(inputs, name).copy()
    array[index] = value
    return replace(inputs, **{name: array})


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("token_ids", (0,), -1, "token_ids"),
        ("token_ids", (3,), VOCAB, "token_ids"),
        ("positions", (1,), 5, "position of token 1"),
        ("slot_mapping", (2,), 513 * 16, "slot_mapping"),
        ("slot_mapping", (2,), -16, "slot_mapping"),
        ("query_start_loc", (0,), 1, "query_start_loc"),
        ("query_start_loc", (1,), 5, "query_start_loc"),
        ("query_start_loc", (1,), -1, "query_start_loc"),
        ("query_start_loc", (2,), 3, "query_start_loc"),
        ("seq_lens", (0,), 2, "length 2"),
        ("seq_lens", (1,), 2000, "length 2000"),
        ("seq_lens", (1,), 200, "table"),
        ("block_tables", (1, 1), 513, "block_tables"),
        ("block_tables", (0, 0), -1, "block_tables"),
        ("logit_rows", (0,), 4, "logit_rows"),
        ("logit_rows", (0,), -1, "logit_rows"),
    ],
)
def test_a_bad_step_is_refused_before_anything_is_written(
    name: str, index: tuple[int, ...], value: int, message: str
) -> None:
    program, sizes = tiny_model(), limits()
    runnable = cpu(program, tiny_weights(program), sizes)
    inputs = good_step(sizes)
    before = runnable.run(inputs).rows("logits").copy()
    with pytest.raises(KernelError, match=message):
        runnable.run(altered(inputs, name, index, value))
    np.testing.assert_array_equal(runnable.run(inputs).rows("logits"), before)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (limits(tokens=3), "4 tokens"),
        (limits(seqs=1), "2 sequences"),
        (limits(blocks_per_seq=4), "blocks per sequence"),
        (replace(limits(), max_rows=3), "4 logit rows"),
    ],
)
def test_a_step_beyond_the_limits_is_refused(sizes: Limits, message: str) -> None:
    program = tiny_model()
    runnable = cpu(program, tiny_weights(program), sizes)
    with pytest.raises(KernelError, match=message):
        runnable.run(good_step(limits()))


@pytest.mark.parametrize("name", ["token_ids", "block_tables", "logit_rows"])
def test_arrays_of_another_type_are_refused(name: str) -> None:
    program, sizes = tiny_model(), limits()
    runnable, inputs = cpu(program, tiny_weights(program), sizes), good_step(sizes)
    for wrong in (np.int64, np.float32):
        with pytest.raises(KernelError, match=name):
            runnable.run(replace(inputs, **{name: getattr(inputs, name).astype(wrong)}))
    with pytest.raises(KernelError):
        runnable.run(replace(inputs, **{name: np.repeat(getattr(inputs, name), 2, axis=-1)[..., ::2]}))


def test_copies_of_blocks_that_do_not_exist_are_refused() -> None:
    program = tiny_model()
    runnable = cpu(program, tiny_weights(program), limits())
    for pair in ((1, 513), (-1, 2)):
        with pytest.raises(KernelError, match="513"):
            runnable.copy_blocks([(1, 2), pair])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_blocks_are_read_and_written_whole(kv_dtype: str) -> None:
    program = tiny_model()
    runnable = cpu(program, tiny_weights(program), replace(limits(), kv_dtype=kv_dtype))
    size = runnable.block_bytes
    data = np.random.default_rng(0).integers(0, 256, (2, size), np.uint8)
    runnable.write_blocks([7, 3], data)
    runnable.copy_blocks([(3, 9)])
    out = np.zeros((4, size), np.uint8)
    runnable.read_blocks([3, 7, 9, 8], out)
    assert (out == [data[1], data[0], data[1], np.zeros(size, np.uint8)]).all()
    for wrong in ([513], [-1]):
        with pytest.raises(KernelError, match="513"):
            runnable.read_blocks(wrong, out[:1])
        with pytest.raises(KernelError, match="513"):
            runnable.write_blocks(wrong, out[:1])


def test_weights_that_do_not_fit_are_named() -> None:
    program = tiny_model()
    weights = dict(tiny_weights(program))
    weights["0.o"] = (Weight("float32", (96, 95), np.zeros((96, 95), np.float32)),)
    with pytest.raises(KernelError, match=r"0\.o"):
        cpu(program, weights, limits())
    del weights["0.o"]
    with pytest.raises(KernelError, match=r"0\.o is missing"):
        cpu(program, weights, limits())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("parts", [(70,), (64,), (300,), (64, 37), (37, 64), (1,)])
def test_maxima_taken_with_the_logits_are_those_of_the_logits(isa: str, threads: int, parts: tuple[int, ...]) -> None:
    """What is sampled right after a step is what a sampler makes of a copy of its logits, bad rows included."""
    vocab, rng = sum(parts), np.random.default_rng(sum(parts))
    b = ProgramBuilder(vocab_size=vocab, max_position=4096)
    program = b.finish(logits=b.linear(b.rows(b.embed(b.token_ids, "table", 32), b.logit_rows), "w", vocab, bias=True))
    weights, sizes = dict(random_weights(program)), limits()
    table, matrix = weights["table"][0].data, weights["w"][0].data
    if vocab > 5:
        table[0], matrix[1:], table[1, 3], matrix[vocab - 2, 3] = 0.0, matrix[1:].round(), 1e30, -1e30  # ties; -inf
    weights["w"] = tuple(
        Weight("float32", (len(rows), 32), rows.copy()) for rows in np.split(matrix, np.cumsum(parts)[:-1])
    )
    runnable = cpu(program, weights, sizes, isa=isa, threads=threads)
    tokens = [t % vocab for t in range(30)]
    outputs = runnable.run(step([Chunk(tokens, 0, [1, 2])], sizes))
    logits = outputs.rows("logits").copy()
    rows = wanted(30, rng)
    rows["top_k"], rows["num_logprobs"] = np.minimum(rows["top_k"], vocab), rng.choice([-1, 0, 1], 30)
    finite = np.isfinite(logits).all(axis=1)
    assert vocab < 6 or finite.sum() == 30 - tokens.count(1)
    at_once, later = outputs.sample(rows, None, None), native(logits, rows, isa=isa)
    np.testing.assert_array_equal(at_once.token_ids < 0, ~finite)
    for i in np.flatnonzero(finite).tolist():
        assert bits(at_once, i, rows) == bits(later, i, rows)
    greedy = outputs.sample(wanted(30, rng, temperature=0.0), None, None)
    np.testing.assert_array_equal(greedy.token_ids[finite], logits.argmax(axis=1)[finite])


def test_an_empty_step_gives_no_rows() -> None:
    program, sizes = tiny_model(), limits()
    runnable = cpu(program, tiny_weights(program), sizes, threads=2)
    assert runnable.run(step([], sizes)).rows("logits").shape == (0, VOCAB)
    assert runnable.run(step([Chunk([1, 2], 0, [1])], sizes, logit_rows=[])).rows("logits").shape == (0, VOCAB)


def test_an_unknown_instruction_set_is_a_kernel_error() -> None:
    with pytest.raises(KernelError, match="mmx"):
        CpuBackend(BackendConfig(threads=1), isa="mmx")


def test_description_names_isa_and_threads() -> None:
    assert CpuBackend(BackendConfig(threads=2), isa="portable").describe() == "portable (baseline), 2 threads"
    assert CpuBackend(BackendConfig(threads=1)).describe().endswith(", 1 thread")
    assert ISAS[-1] == "portable"


def test_waiting_threads_use_no_cpu() -> None:
    program, sizes = tiny_model(), limits()
    runnable = cpu(program, tiny_weights(program), sizes, threads=3)
    runnable.run(good_step(sizes))
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1


def test_untouched_kv_memory_is_not_resident() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    program, sizes = tiny_model(), limits(blocks=1 << 17)
    weights, before = tiny_weights(program), resident()
    runnable = cpu(program, weights, sizes)
    runnable.run(good_step(sizes))
    assert runnable._native.kv_bytes > 256 << 20  # type: ignore[attr-defined]
    assert resident() - before < 64 << 20


def test_a_forked_child_computes_with_its_own_threads() -> None:
    script = """
import os, sys
import numpy as np
from tests.kernels.kernel_programs import cpu, limits
from tests.kernels.test_program import good_step, tiny_model, tiny_weights

program, sizes = tiny_model(), limits()
runnable = cpu(program, tiny_weights(program), sizes, threads=2)
before = runnable.run(good_step(sizes)).rows("logits").copy()
child = os.fork()
if child == 0:
    same = np.array_equal(runnable.run(good_step(sizes)).rows("logits"), before)
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(runnable.run(good_step(sizes)).rows("logits"), before)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_pools_start_and_stop() -> None:
    for threads in (1, 2, 5):
        assert _kernels.ThreadPool(threads).threads == threads
    with pytest.raises(ValueError, match="at least one"):
        _kernels.ThreadPool(0)


def test_phases_can_be_timed() -> None:
    program, sizes = tiny_model(), limits()
    runnable = cpu(program, tiny_weights(program), sizes, threads=2)
    runnable.measure()  # type: ignore[attr-defined]
    runnable.run(good_step(sizes))
    phases = runnable.measurements()  # type: ignore[attr-defined]
    assert [name for name, _ in phases[:4]] == [
        "embed + rms_norm and prepare",
        "linear",
        "rope_table + rope + rope + write_kv",
        "attention",
    ]
    assert all(seconds > 0 for _, seconds in phases)
    runnable.measure(False)  # type: ignore[attr-defined]
    assert runnable.measurements() == []  # type: ignore[attr-defined]
