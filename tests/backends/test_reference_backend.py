"""The reference backend keeps to its limits and to the contract of backends."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import Limits, StepInputs
from octavo.backends.reference.backend import ReferenceBackend
from octavo.backends.registry import make_backend
from octavo.config import BackendConfig
from octavo.exceptions import KernelError
from octavo.program import LayerKV, Op, Program, ProgramBuilder, Value
from octavo.quantization.base import Weight, Weights

LIMITS = Limits(max_tokens=4, max_rows=2, max_seqs=2, max_blocks_per_seq=2, num_blocks=4, block_size=16)


def tiny_program() -> Program:
    b = ProgramBuilder(vocab_size=8, max_position=32)
    x = b.embed(b.token_ids, "embed", 4)
    x = b.attention(x, x, x, layer=0, num_heads=1, num_kv_heads=1)
    return b.finish(logits=b.linear(b.rows(x, b.logit_rows), "head", 8))


def tiny_weights() -> Weights:
    table = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    parts = (Weight("float32", (3, 4), table[:3]), Weight("float32", (5, 4), table[3:]))
    return {"embed": parts, "head": parts}


def step(tokens: int = 1, rows: int = 1, seqs: int = 1, blocks: int = 1) -> StepInputs:
    """A first step: ``tokens`` of the first request, and one-token requests after it."""
    lengths = [tokens - seqs + 1] + [1] * (seqs - 1)
    tables = np.arange(1, seqs + 1)[:, None] * np.ones((1, blocks))
    positions = [p for length in lengths for p in range(length)]
    slots = [16 * (s + 1) + p for s, length in enumerate(lengths) for p in range(length)]
    arrays = (range(tokens), positions, slots, np.cumsum([0, *lengths]), lengths, tables, range(rows))
    return StepInputs(*(np.array(a, dtype=np.int32) for a in arrays))


def test_stacked_and_shared_parts() -> None:
    runnable = ReferenceBackend(BackendConfig()).prepare(tiny_program(), tiny_weights(), LIMITS)
    assert runnable.weight_bytes == 8 * 4 * 4, "a shared parameter counts once"
    logits = runnable.run(step(tokens=4, rows=2, seqs=2, blocks=2)).rows("logits")
    table = np.concatenate([part.dequantize() for part in tiny_weights()["embed"]])
    assert logits.dtype == np.float32
    assert logits.shape == (2, 8)
    np.testing.assert_allclose(logits[0], table @ table[0], rtol=1e-6)  # the first row attends to itself alone


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"tokens": 5}, "5 tokens"),
        ({"tokens": 4, "rows": 3}, "3 logit rows"),
        ({"tokens": 3, "seqs": 3}, "3 sequences"),
        ({"blocks": 3}, "3 blocks"),
    ],
)
def test_steps_beyond_the_limits_are_refused(size: dict[str, int], message: str) -> None:
    runnable = ReferenceBackend(BackendConfig()).prepare(tiny_program(), tiny_weights(), LIMITS)
    with pytest.raises(KernelError, match=message):
        runnable.run(step(**size))


def test_unknown_op_and_wrong_weight_are_refused() -> None:
    program = tiny_program()
    odd = Op("fft", (program.outputs["logits"],), (Value(99, ("R", 8)),))
    with pytest.raises(KernelError, match="fft"):
        ReferenceBackend(BackendConfig()).prepare(
            Program(**{f: getattr(program, f) for f in Program.__slots__} | {"ops": (*program.ops, odd)}),
            tiny_weights(),
            LIMITS,
        )
    short = dict(tiny_weights()) | {"head": tiny_weights()["head"][:1]}
    with pytest.raises(KernelError, match="head"):
        ReferenceBackend(BackendConfig()).prepare(program, short, LIMITS)


def test_registry_makes_it() -> None:
    backend = make_backend(BackendConfig(backend="reference"))
    assert backend.name == "reference"
    layer = LayerKV(num_heads=3, key_dim=8, value_dim=6)
    assert backend.kv_bytes(layer) == 3 * (8 + 6) * 4
    assert ReferenceBackend(BackendConfig(), np.float64).kv_bytes(layer) == 3 * (8 + 6) * 8
    assert backend.kv_bytes(layer, "int8") == 3 * (8 + 6) * 4, "rounded numbers stay float32"
    assert "NumPy float32" in backend.describe()
