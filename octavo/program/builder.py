"""ProgramBuilder: writing a program reads like an eager forward pass.

Every method appends one op, checked against the op table, and returns its result(s). Weights are declared by use.
Knows no values and no checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.exceptions import ModelError
from octavo.messages import kind_of
from octavo.program.kv import LayerKV, group_layers
from octavo.program.ops import OPS
from octavo.program.program import Op, Program, Rope, Value, WeightSpec


class ProgramBuilder:
    """Collects ops; ``finish`` returns the immutable Program.

    Attributes ``token_ids`` [T], ``positions`` [T] and ``logit_rows`` [R] are the step's inputs (int32).
    All methods raise ModelError when shapes or attributes do not fit the op table.
    """

    def __init__(self, *, vocab_size: int, max_position: int) -> None:
        self.vocab_size, self.max_position = vocab_size, max_position
        self.token_ids = Value(0, ("T",), "int32")
        self.positions = Value(1, ("T",), "int32")
        self.logit_rows = Value(2, ("R",), "int32")
        self._ops: list[Op] = []
        self._weights: dict[str, WeightSpec] = {}
        self._next_id = 3

    def embed(self, token_ids: Value, name: str, width: int, *, scale: float = 1.0) -> Value:
        """Rows of the table ``name`` [vocab_size, width], times ``scale``."""
        table = {"table": self._weight(name, self.vocab_size, width)}
        return self._one("embed", (token_ids,), table, {"scale": scale})

    def linear(self, x: Value, name: str, out_features: int, *, bias: bool = False) -> Value:
        """``x @ name.T``, plus ``name.bias`` [out_features] when ``bias``; ``name`` is [out_features, x.width]."""
        weights = {"weight": self._weight(name, out_features, x.width)}
        if bias:
            weights["bias"] = self._weight(f"{name}.bias", out_features)
        return self._one("linear", (x,), weights)

    def rms_norm(self, x: Value, name: str, eps: float, *, groups: int = 1) -> Value:
        """RMS norm over each of ``groups`` equal parts of each row, scaled by ``name`` [x.width / groups]."""
        weight = {"weight": self._weight(name, x.width // groups)}
        return self._one("rms_norm", (x,), weight, {"eps": eps, "groups": groups})

    def layer_norm(self, x: Value, name: str, eps: float, *, bias: bool = False) -> Value:
        """Layer norm of each row, scaled by ``name`` [x.width], plus ``name.bias`` [x.width] when ``bias``."""
        weights = {"weight": self._weight(name, x.width)}
        if bias:
            weights["bias"] = self._weight(f"{name}.bias", x.width)
        return self._one("layer_norm", (x,), weights, {"eps": eps})

    def add(self, a: Value, b: Value) -> Value:
        """``a + b``."""
        return self._one("add", (a, b))

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Consecutive column ranges."""
        return self._emit("split", (x,), {}, {"widths": widths})

    def rope(self, q: Value, k: Value, positions: Value, rope: Rope) -> tuple[Value, Value]:
        """q and k, rotated by position."""
        q, k = self._emit("rope", (q, k, positions), {}, {"rope": rope})
        return q, k

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        scale: float | None = None,
        window: int | None = None,
    ) -> Value:
        """Causal attention over the paged cache of ``layer``; ``scale`` defaults to key_dim ** -0.5.

        ``window``: tokens that a token sees at most, itself included; None: all before it.
        """
        key_dim = k.width // max(1, num_kv_heads)
        attrs = {
            "layer": layer,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "key_dim": key_dim,
            "value_dim": v.width // max(1, num_kv_heads),
            "scale": key_dim**-0.5 if scale is None else scale,
            "window": window,
        }
        return self._one("attention", (q, k, v), {}, attrs)

    def silu_mul(self, x: Value) -> Value:
        """``silu(gate) * up`` of x = [gate | up]."""
        return self._one("silu_mul", (x,))

    def gelu_mul(self, x: Value) -> Value:
        """``gelu(gate) * up`` of x = [gate | up], gelu by its approximation with tanh."""
        return self._one("gelu_mul", (x,))

    def gelu(self, x: Value, *, tanh: bool = False) -> Value:
        """``gelu(x)``, exactly or by its approximation with ``tanh``."""
        return self._one("gelu", (x,), {}, {"tanh": tanh})

    def soft_cap(self, x: Value, cap: float) -> Value:
        """``cap * tanh(x / cap)``."""
        return self._one("soft_cap", (x,), {}, {"cap": cap})

    def rows(self, x: Value, logit_rows: Value) -> Value:
        """The chosen rows of x."""
        return self._one("rows", (x, logit_rows))

    def finish(self, *, logits: Value | None = None, hidden: Value | None = None) -> Program:
        """The program, with one named output or more. Layers of attention must be 0..n-1, each once.

        ``logits`` [R, vocab_size] are what tokens are sampled from; ``hidden`` [T, width] is what the last layer, its
        norm included, makes of each token.
        """
        outputs = {name: value for name, value in (("logits", logits), ("hidden", hidden)) if value is not None}
        if not outputs:
            raise ModelError("a program without outputs")
        if logits is not None and logits.shape != ("R", self.vocab_size):
            raise ModelError(f"logits are {logits.shape}, not ('R', {self.vocab_size})")
        if hidden is not None and (hidden.dtype != "float" or hidden.shape[0] != "T"):
            raise ModelError(f"hidden is {hidden.shape} of {hidden.dtype}, not a row per token")
        attention = [op.attrs for op in self._ops if op.kind == "attention"]
        layers = [attrs["layer"] for attrs in attention]
        if layers != list(range(len(layers))):
            raise ModelError(f"attention layers are {layers}, not 0..{len(layers) - 1} in order")
        kv_layers = tuple(self._layer_kv(attrs) for attrs in attention)
        return Program(
            ops=tuple(self._ops),
            inputs={"token_ids": self.token_ids, "positions": self.positions, "logit_rows": self.logit_rows},
            weights=dict(self._weights),
            outputs=outputs,
            max_position=self.max_position,
            vocab_size=self.vocab_size,
            kv_layers=kv_layers,
            kv_groups=group_layers(kv_layers),
        )

    def _layer_kv(self, attrs: Mapping[str, Any]) -> LayerKV:
        """What attention of these attributes keeps. A window that no sequence is longer than is none."""
        window = attrs["window"]
        if window is not None and window >= self.max_position:
            window = None
        return LayerKV(attrs["num_kv_heads"], attrs["key_dim"], attrs["value_dim"], kind_of(window), window)

    def _weight(self, name: str, *shape: int) -> str:
        spec = self._weights.setdefault(name, WeightSpec(name, shape))
        if spec.shape != shape:
            raise ModelError(f"weight {name} is used as {list(shape)} and as {list(spec.shape)}")
        return name

    def _one(self, kind: str, inputs: tuple[Value, ...], *rest: Mapping[str, Any]) -> Value:
        (out,) = self._emit(kind, inputs, *rest)
        return out

    def _emit(
        self,
        kind: str,
        inputs: tuple[Value, ...],
        weights: Mapping[str, str] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> tuple[Value, ...]:
        spec, weights, attrs = OPS[kind], weights or {}, attrs or {}
        least = len(spec.inputs) - len(spec.optional_inputs)
        if not least <= len(inputs) <= len(spec.inputs) or set(attrs) != set(spec.attrs):
            raise ModelError(f"op {kind}: takes inputs {spec.inputs} and attrs {spec.attrs}")
        specs = {parameter: self._weights[name] for parameter, name in weights.items()}
        shapes = spec.infer(dict(zip(spec.inputs, inputs)), specs, attrs)
        outputs = tuple(Value(self._next_id + n, shape) for n, shape in enumerate(shapes))
        self._next_id += len(outputs)
        self._ops.append(Op(kind, inputs, outputs, dict(weights), dict(attrs)))
        return outputs
