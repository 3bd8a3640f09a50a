"""The op table: every op a program may contain, with its signature, shape rule and meaning.

A backend implements these and nothing else; the op tests enumerate ``OPS``. The shape function's docstring is the op's
definition. Rules that hold for every op:

* "float" values are the backend's activation type (float32 in the reference; bf16 or int8 where kernels choose so).
* Weights arrive in any format of ``quantization.base``; vectors (norms, biases) are float32 numbers.
* Each output row depends only on its own input row (attention: on its own request), and the order of every reduction
  depends only on sizes of the model, never on T, R, the other rows or the threads.

Knows no values, no kernels and no file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.exceptions import ModelError
from octavo.program.program import Dim, Value, WeightSpec

Shape = tuple[Dim, ...]
InferShapes = Callable[[Mapping[str, Value], Mapping[str, WeightSpec], Mapping[str, Any]], tuple[Shape, ...]]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Signature of an op. All outputs are "float".

    ``inputs``, ``weights`` and ``attrs`` are names, inputs in positional order; ``optional_weights`` and the
    ``optional_inputs`` at the end may be absent. ``fused``: passes make it, families do not.
    ``infer(inputs, weights, attrs)`` checks shapes (ModelError) and returns one shape per output.
    """

    name: str
    infer: InferShapes
    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    optional_weights: tuple[str, ...] = ()
    attrs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    fused: bool = False

    @property
    def semantics(self) -> str:
        """The op's definition, as text."""
        return self.infer.__doc__ or ""


def _require(ok: bool, op: str, rule: str) -> None:
    if not ok:
        raise ModelError(f"op {op}: {rule}")


def _embed(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out[t] = table[token_ids[t]] * scale``. token_ids [T] int32, table [V, H] -> [T, H]. ``scale`` is a float.

    Ids are in 0..V-1 (the engine checks them at admission).
    """
    (rows,), (_, hidden) = i["token_ids"].shape, w["table"].shape
    return ((rows, hidden),)


def _linear(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = x @ weight.T + bias``. x [T|R, K], weight [N, K], bias [N] or absent -> [T|R, N].

    Sums are at least float32.
    """
    (rows, k), (n, weight_k) = i["x"].shape, w["weight"].shape
    _require(k == weight_k, "linear", f"x is [{rows}, {k}] but {w['weight'].name} is [{n}, {weight_k}]")
    _require("bias" not in w or w["bias"].shape == (n,), "linear", f"bias of {w['weight'].name} is not [{n}]")
    return ((rows, n),)


def _rms_norm(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = x / sqrt(mean(x * x) + eps) * weight`` over each row. x [T|R, H], weight [H] -> [T|R, H].

    With more than one of ``groups``, over each of so many equal parts of a row, weight [H / groups] serving them all.
    Zhang and Sennrich, 2019. The mean is at least float32.
    """
    x, groups = i["x"], a["groups"]
    _require(groups >= 1 and x.width % groups == 0, "rms_norm", f"{groups} groups of {x.width} columns")
    width = x.width // groups
    _require(w["weight"].shape == (width,), "rms_norm", f"weight {w['weight'].name} is not [{width}]")
    return (x.shape,)


def _fused_linear(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = gate(linear(norm(x), weight, bias)) + residual`` in one op, the same numbers as one after the other.

    The rms_norm of weights ``norm`` and ``eps`` may be absent, as may ``bias`` and ``residual``; ``gate`` is the name
    of an op that gates (silu_mul, gelu_mul) or "".
    """
    _linear(i, w, a)
    width = w["weight"].shape[0]
    return ((i["x"].shape[0], width // 2 if a["gate"] else width),)


def _layer_norm(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = (x - m) / sqrt(mean((x - m)^2) + eps) * weight + bias`` with m = mean(x), over each row of x [T|R, H].

    weight [H], bias [H] or absent -> [T|R, H]. Ba, Kiros and Hinton, 2016. The means are at least float32.
    """
    width = i["x"].width
    _require(all(spec.shape == (width,) for spec in w.values()), "layer_norm", f"its weights are not [{width}]")
    return (i["x"].shape,)


def _gelu(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = x / 2 * (1 + erf(x / sqrt(2)))``, or with ``tanh`` (a bool) the approximation of gelu_mul.

    Hendrycks and Gimpel, 2016.
    """
    return (i["x"].shape,)


def _soft_cap(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = cap * tanh(x / cap)``; ``cap`` is a positive float. Gemma Team, 2024 (Gemma 2)."""
    _require(a["cap"] > 0, "soft_cap", f"a cap of {a['cap']}")
    return (i["x"].shape,)


def _add(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = a + b``. Equal shapes."""
    _require(i["a"].shape == i["b"].shape, "add", f"shapes {i['a'].shape} and {i['b'].shape} differ")
    return (i["a"].shape,)


def _split(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Consecutive column ranges of x [T|R, sum(widths)]: one output [T|R, width] per entry of ``widths`` (ints).

    Outputs may be views.
    """
    x = i["x"]
    _require(sum(a["widths"]) == x.width, "split", f"widths {a['widths']} do not add up to {x.width}")
    return tuple((x.shape[0], width) for width in a["widths"])


def _rope(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Rotate every head of q [T, Hq * D] and k [T, Hkv * D] by its row's position; positions [T] int32.

    ``rope`` is a ``program.Rope``: D = rope.head_dim, P = len(rope.inv_freq), 2P <= D. For each head and pair j < P,
    with angle = position * inv_freq[j], c = cos(angle) * attention_factor, s = sin(angle) * attention_factor:
    ``out[j] = x[j] * c - x[j + P] * s; out[j + P] = x[j + P] * c + x[j] * s``; elements from 2P on are unchanged.
    Angles are computed in at least float32 from an inv_freq rounded to float32. Su et al., 2021.
    """
    q, k, rope = i["q"], i["k"], a["rope"]
    _require(q.width % rope.head_dim == 0 and k.width % rope.head_dim == 0, "rope", "widths are not whole heads")
    _require(2 * len(rope.inv_freq) <= rope.head_dim, "rope", "more pairs than the head has")
    return (q.shape, k.shape)


def _attention(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Write k and v to the KV cache of ``layer``, then causal attention of q over the cache.

    q [T, num_heads * key_dim], k [T, num_kv_heads * key_dim], v [T, num_kv_heads * value_dim]
    -> [T, num_heads * value_dim]. Layers may differ in all of these. Row t's k and v go to slot_mapping[t] of the step.
    Row t of request s at position p attends to positions 0..p of s, position j being read from block
    block_tables[s, j // block_size], offset j % block_size; query head h uses KV head h // (num_heads / num_kv_heads).
    ``out = softmax(q . k * scale) @ v``, in at least float32. With a ``window`` (int; None: no window) it attends to
    positions max(0, p - window + 1)..p only, as transformers' sliding_window_overlay has it, and blocks that lie before
    the window of a request's first row are not read: their entries of the table may be any block. Slots and table are
    those of the layer's group (``Program.kv_groups``).
    """
    heads, kv_heads, key_dim, value_dim = a["num_heads"], a["num_kv_heads"], a["key_dim"], a["value_dim"]
    _require(kv_heads > 0 and heads % kv_heads == 0, "attention", f"{heads} heads over {kv_heads} KV heads")
    _require(i["k"].width == kv_heads * key_dim, "attention", f"k is not {kv_heads} heads of {key_dim}")
    _require(i["v"].width == kv_heads * value_dim, "attention", f"v is not {kv_heads} heads of {value_dim}")
    _require(i["q"].width == heads * key_dim, "attention", f"q is not {heads} heads of {key_dim}")
    _require(a["window"] is None or a["window"] >= 1, "attention", f"a window of {a['window']} tokens")
    return ((i["q"].shape[0], heads * value_dim),)


def _silu_mul(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = silu(gate) * up`` with x = [gate | up], ``silu(z) = z / (1 + exp(-z))``. x [T, 2I] -> [T, I]."""
    x = i["x"]
    _require(x.width % 2 == 0, "silu_mul", f"width {x.width} is odd")
    return ((x.shape[0], x.width // 2),)


def _gelu_mul(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out = gelu(gate) * up`` with x = [gate | up], ``gelu(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 *
    z^3)))``. x [T, 2I] -> [T, I]. Hendrycks and Gimpel, 2016 (the approximation)."""
    x = i["x"]
    _require(x.width % 2 == 0, "gelu_mul", f"width {x.width} is odd")
    return ((x.shape[0], x.width // 2),)


def _rows(i: Mapping[str, Value], w: Mapping[str, WeightSpec], a: Mapping[str, Any]) -> tuple[Shape, ...]:
    """``out[r] = x[logit_rows[r]]``. x [T, H], logit_rows [R] int32 -> [R, H]."""
    return ((i["logit_rows"].shape[0], i["x"].width),)


_TABLE = (
    OpSpec("embed", _embed, inputs=("token_ids",), weights=("table",), attrs=("scale",)),
    OpSpec("linear", _linear, inputs=("x",), weights=("weight",), optional_weights=("bias",)),
    OpSpec("rms_norm", _rms_norm, inputs=("x",), weights=("weight",), attrs=("eps", "groups")),
    OpSpec(
        "fused_linear",
        _fused_linear,
        inputs=("x",),
        weights=("weight",),
        optional_weights=("bias", "norm"),
        attrs=("eps", "gate"),
        optional_inputs=("residual",),
        fused=True,
    ),
    OpSpec("layer_norm", _layer_norm, inputs=("x",), weights=("weight",), optional_weights=("bias",), attrs=("eps",)),
    OpSpec("gelu", _gelu, inputs=("x",), attrs=("tanh",)),
    OpSpec("soft_cap", _soft_cap, inputs=("x",), attrs=("cap",)),
    OpSpec("add", _add, inputs=("a", "b")),
    OpSpec("split", _split, inputs=("x",), attrs=("widths",)),
    OpSpec("rope", _rope, inputs=("q", "k", "positions"), attrs=("rope",)),
    OpSpec(
        "attention",
        _attention,
        inputs=("q", "k", "v"),
        attrs=("layer", "num_heads", "num_kv_heads", "key_dim", "value_dim", "scale", "window"),
    ),
    OpSpec("silu_mul", _silu_mul, inputs=("x",)),
    OpSpec("gelu_mul", _gelu_mul, inputs=("x",)),
    OpSpec("rows", _rows, inputs=("x", "logit_rows")),
)

OPS: dict[str, OpSpec] = {spec.name: spec for spec in _TABLE}
