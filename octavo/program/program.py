"""Program: a list of ops in single-assignment form with symbolic sizes.

Sizes are ints or the symbols ``"T"`` (tokens of the step, any mix of requests) and ``"R"`` (rows that need logits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.program.kv import KVGroup, LayerKV

Dim = int | Literal["T", "R"]
DType = Literal["int32", "float"]  # "float": the backend's activation type


@dataclass(frozen=True, slots=True)
class Value:
    """The result of one op (or a program input): ``shape`` e.g. ``("T", 576)``; ``id`` is unique in the program."""

    id: int
    shape: tuple[Dim, ...]
    dtype: DType = "float"

    @property
    def width(self) -> int:
        """Size of the last axis (always a number)."""
        last = self.shape[-1]
        assert isinstance(last, int)
        return last


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A named parameter. Matrices are ``[out_features, in_features]`` as in checkpoints."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding in the half-split ("neox") layout of HF checkpoints.

    ``inv_freq`` has ``rotary_dim / 2`` entries, already scaled (linear, Llama 3, YaRN are done by the family);
    angle of position p, pair i is ``p * inv_freq[i]``. ``attention_factor`` multiplies cos and sin.
    """

    head_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Op:
    """One step: ``outputs = kind(inputs, weights; attrs)``. ``kind`` is a key of ``program.ops.OPS``.

    ``weights`` holds weight names by the op's parameter name, e.g. ``{"weight": "layers.0.qkv", "bias": ...}``.
    """

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole model. ``inputs`` are named step inputs, ``outputs`` named results: see ``ProgramBuilder.finish``.

    ``kv_layers`` is what each attention layer keeps, ``kv_groups`` which of them share blocks.
    """

    ops: tuple[Op, ...]
    inputs: Mapping[str, Value]  # token_ids [T], positions [T], logit_rows [R]
    weights: Mapping[str, WeightSpec]
    outputs: Mapping[str, Value]
    max_position: int
    vocab_size: int
    kv_layers: tuple[LayerKV, ...]
    kv_groups: tuple[KVGroup, ...]

    @property
    def group_of_layer(self) -> dict[int, int]:
        """The group of each attention layer."""
        return {layer: number for number, group in enumerate(self.kv_groups) for layer in group.layers}
