"""The builder refuses what the op table does not allow, and its program is in single-assignment form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.exceptions import ModelError
from octavo.program import OPS, KVGroup, LayerKV, Op, ProgramBuilder, Rope, Value, WeightSpec

HEADS = {"num_heads": 4, "num_kv_heads": 2}


@pytest.fixture
def b() -> ProgramBuilder:
    return ProgramBuilder(vocab_size=64, max_position=128)


def qkv(b: ProgramBuilder) -> tuple[Value, ...]:
    x = b.embed(b.token_ids, "embed", 32)
    return b.split(b.linear(x, "qkv", 64, bias=True), 32, 16, 16)


def test_program_states_every_shape(b: ProgramBuilder) -> None:
    q, k, v = qkv(b)
    q, k = b.rope(q, k, b.positions, Rope(8, (1.0, 0.1)))
    x = b.rms_norm(b.add(q, b.attention(q, k, v, layer=0, **HEADS)), "norm", 1e-5)
    x = b.gelu(b.layer_norm(b.gelu_mul(b.silu_mul(x)), "layer_norm", 1e-5, bias=True))
    hidden, x = x, b.rows(x, b.logit_rows)
    program = b.finish(logits=b.soft_cap(b.linear(x, "head", 64), 30.0), hidden=hidden)
    assert {name: value.shape for name, value in program.outputs.items()} == {"logits": ("R", 64), "hidden": ("T", 8)}
    assert x.shape == ("R", 8)
    assert program.kv_layers == (LayerKV(num_heads=2, key_dim=8, value_dim=8),)
    assert program.kv_groups == (KVGroup((0,)),)
    assert program.weights == {
        "embed": WeightSpec("embed", (64, 32)),
        "qkv": WeightSpec("qkv", (64, 32)),
        "qkv.bias": WeightSpec("qkv.bias", (64,)),
        "norm": WeightSpec("norm", (32,)),
        "layer_norm": WeightSpec("layer_norm", (8,)),
        "layer_norm.bias": WeightSpec("layer_norm.bias", (8,)),
        "head": WeightSpec("head", (64, 8)),
    }
    made = {name for name, spec in OPS.items() if not spec.fused}
    assert {op.kind for op in program.ops} == made, "every op of the table that no pass makes has a method"


def test_values_are_assigned_once_and_before_use(b: ProgramBuilder) -> None:
    q, k, v = qkv(b)
    program = b.finish(logits=b.linear(b.rows(b.attention(q, k, v, layer=0, **HEADS), b.logit_rows), "head", 64))
    known = {value.id for value in program.inputs.values()}
    for op in program.ops:
        assert {value.id for value in op.inputs} <= known
        made = [value.id for value in op.outputs]
        assert known.isdisjoint(made)
        known.update(made)


def test_attention_scale_defaults_to_the_root_of_the_head(b: ProgramBuilder) -> None:
    q, k, v = qkv(b)
    b.attention(q, k, v, layer=0, **HEADS)
    b.attention(q, k, v, layer=1, **HEADS, scale=0.5)
    x = b.linear(b.rows(q, b.logit_rows), "head", 64)
    ops = [op for op in b.finish(logits=x).ops if op.kind == "attention"]
    assert [op.attrs["scale"] for op in ops] == [8**-0.5, 0.5]


MISTAKES: dict[str, tuple[str, Callable[[ProgramBuilder], object]]] = {
    "sum of widths": ("add up", lambda b: b.split(qkv(b)[0], 16, 8)),
    "unequal shapes": ("differ", lambda b: b.add(*qkv(b)[:2])),
    "odd gate and up": ("odd", lambda b: b.silu_mul(b.linear(qkv(b)[0], "w", 7))),
    "odd gate and up of gelu": ("odd", lambda b: b.gelu_mul(b.linear(qkv(b)[0], "w", 7))),
    "uneven groups": ("3 groups", lambda b: b.rms_norm(qkv(b)[0], "g", 1e-5, groups=3)),
    "half heads": ("whole heads", lambda b: b.rope(*qkv(b)[:2], b.positions, Rope(12, (1.0,)))),
    "pairs beyond the head": ("pairs", lambda b: b.rope(*qkv(b)[:2], b.positions, Rope(8, (1.0,) * 5))),
    "wrong q": ("4 heads", lambda b: b.attention(qkv(b)[1], *qkv(b)[1:], layer=0, **HEADS)),
    "uneven keys": ("k is not 3 heads", lambda b: b.attention(*qkv(b), layer=0, num_heads=6, num_kv_heads=3)),
    "no KV heads": ("0 KV heads", lambda b: b.attention(*qkv(b), layer=0, num_heads=4, num_kv_heads=0)),
    "weight used in two shapes": ("used as", lambda b: (qkv(b), b.linear(qkv(b)[0], "qkv", 5))),
    "a cap of nothing": ("a cap of 0", lambda b: b.soft_cap(qkv(b)[0], 0.0)),
    "no outputs": ("without outputs", lambda b: b.finish()),
    "hidden of logit rows": (
        "a row per token",
        lambda b: b.finish(hidden=b.rows(qkv(b)[0], b.logit_rows)),
    ),
    "logits of all rows": ("logits", lambda b: b.finish(logits=b.linear(qkv(b)[0], "head", 64))),
    "logits of another width": (
        "logits",
        lambda b: b.finish(logits=b.linear(b.rows(qkv(b)[0], b.logit_rows), "head", 63)),
    ),
    "layer left out": (
        "layers",
        lambda b: (
            b.attention(*qkv(b), layer=1, **HEADS),
            b.finish(logits=b.linear(b.rows(qkv(b)[0], b.logit_rows), "head", 64)),
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(b: ProgramBuilder, mistake: str) -> None:
    message, make = MISTAKES[mistake]
    with pytest.raises(ModelError, match=message):
        make(b)


def test_table_explains_every_name_it_uses() -> None:
    for name, spec in OPS.items():
        assert spec.name == name
        for word in (*spec.inputs, *spec.optional_inputs, *spec.weights, *spec.optional_weights, *spec.attrs):
            assert word in spec.semantics, f"{name} does not say what {word} is"


def test_ops_are_plain_data(b: ProgramBuilder) -> None:
    x = b.embed(b.token_ids, "embed", 32)
    y = b.linear(x, "w", 8, bias=True)
    program = b.finish(logits=b.linear(b.rows(y, b.logit_rows), "head", 64))
    assert program.ops[1] == Op("linear", (x,), (y,), {"weight": "w", "bias": "w.bias"}, {})
