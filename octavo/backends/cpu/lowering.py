"""Lowering: a Program's ops -> phases of native stages on planned buffers.

Row stages (each row alone) share a phase as long as nothing makes them wait for other rows; linears and attention are
wide: a phase each. Rope and residuals work in place where no later op reads the old value. Knows no addresses and no
packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import Any

from octavo.backends.base import Limits
from octavo.backends.cpu.buffers import Buffer, View, plan_arena
from octavo.exceptions import KernelError
from octavo.program import OPS, Op, Program, Rope, Value
from octavo.program.passes.fuse import fuse


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stage's argument: a linear, or a table, by the names of its parameters."""

    name: str
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """A stage's argument: a parameter that is a vector, or None."""

    name: str | None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the native program (csrc/ops, csrc/stages) by name, and its arguments.

    Views among these become places, Matrix and Vector what the packed weights have of that name.
    """

    kind: str
    args: dict[str, Any]


@dataclass(slots=True)
class Phase:
    """Stages between two barriers. ``rows``: "T" or "R" for row stages, None for one wide stage."""

    rows: str | None
    stages: list[Stage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """Phases in order; every View's buffer has its offset. ``arena_floats`` is the memory they need together."""

    phases: list[Phase]
    outputs: dict[str, View]
    arena_floats: int


def lower(
    program: Program,
    limits: Limits,
    scratch_bytes: Callable[[str, int], int],
    row_ops: Set[str],
    gated: Collection[str] = (),
) -> LoweredProgram:
    """Lower ``program`` for steps within ``limits``.

    ``scratch_bytes(weight name, rows)`` is what a linear needs for converted activations; ``row_ops`` are the names of
    the kernels in csrc/ops; ``gated``: see ``passes.fuse``. Raises KernelError naming an op that has no kernel.
    """
    known = _HANDLERS.keys() | (OPS.keys() & row_ops)
    program = fuse(program, gated=gated)
    lowering = _Lowering(program, limits, scratch_bytes, gated)
    for index, op in enumerate(program.ops):
        if op.kind not in known:
            raise KernelError(f"the CPU backend has no op {op.kind!r}")
        _HANDLERS.get(op.kind, _row_op)(lowering, index, op)
    outputs = {name: lowering.views[value.id] for name, value in program.outputs.items()}
    for buffer in (*(view.buffer for view in outputs.values()), *lowering.kept):
        buffer.touch(len(lowering.phases))
    return LoweredProgram(lowering.phases, outputs, plan_arena(lowering.buffers))


class _Lowering:
    """State of one lowering: phases so far, and where each value lies."""

    def __init__(
        self, program: Program, limits: Limits, scratch_bytes: Callable[[str, int], int], gated: Collection[str]
    ) -> None:
        self.logits, self.limits = program.outputs.get("logits"), limits
        self.scratch_bytes, self.gated = scratch_bytes, gated
        self.phases: list[Phase] = []
        self.buffers: list[Buffer] = []
        self.kept: list[Buffer] = []  # read after the step, besides the logits
        self.views: dict[int, View] = {}
        self.rope_tables: dict[Rope, View] = {}
        self._values: dict[Buffer, list[Value]] = {}
        self._last_use: dict[int, int] = {}
        for index, op in enumerate(program.ops):
            for value in op.inputs:
                self._last_use[value.id] = index
        for value in program.outputs.values():
            self._last_use[value.id] = len(program.ops)

    def capacity(self, value: Value) -> int:
        """Most rows a value can have."""
        return self.limits.max_tokens if value.shape[0] == "T" else self.limits.max_rows

    def new_buffer(self, floats: int, stride: int) -> Buffer:
        buffer = Buffer(floats, stride)
        self.buffers.append(buffer)
        return buffer

    def maxima(self, value: Value) -> View | None:
        """Room for the maxima (csrc/include/octavo/maxima.h) of ``value``, if that is the logits."""
        if value != self.logits:
            return None
        count = -(-value.width // 512) * 16
        self.kept.append(self.new_buffer(self.capacity(value) * count, count))
        return View(self.kept[-1])

    def bind(self, value: Value, view: View) -> View:
        """``value`` lies at ``view``."""
        self.views[value.id] = view
        self._values.setdefault(view.buffer, []).append(value)
        return view

    def allocate(self, value: Value) -> View:
        """A new buffer for ``value``."""
        return self.bind(value, View(self.new_buffer(self.capacity(value) * value.width, value.width)))

    def reuse_or_allocate(self, value: Value, old: Value, index: int) -> View:
        """The place of ``old`` if no op after op ``index`` reads it, or a value lying over it; else a new one."""
        view = self.views[old.id]
        start, end = view.column, view.column + old.width
        for other in self._values[view.buffer]:
            column = self.views[other.id].column
            overlaps = column < end and start < column + other.width
            if overlaps and self._last_use.get(other.id, -1) > index:
                return self.allocate(value)
        return self.bind(value, view)

    def add_row_stage(self, rows: Any, kind: str, **args: Any) -> None:
        """Append a row stage over ``rows`` ("T" or "R")."""
        if not self.phases or self.phases[-1].rows != rows:
            self.phases.append(Phase(rows))
        self._append(kind, args)

    def add_wide_stage(self, kind: str, **args: Any) -> None:
        """Append a wide stage."""
        self.phases.append(Phase(None))
        self._append(kind, args)

    def _append(self, kind: str, args: dict[str, Any]) -> None:
        for arg in args.values():
            if isinstance(arg, View):
                arg.buffer.touch(len(self.phases) - 1)
        self.phases[-1].stages.append(Stage(kind, args))

    def rope_table(self, rope: Rope) -> View:
        """Cosines and sines of the step's positions; made once, in the first place that needs them."""
        if rope not in self.rope_tables:
            width = 2 * len(rope.inv_freq)
            table = View(self.new_buffer(self.limits.max_tokens * width, width))
            frequencies = list(rope.inv_freq)
            self.add_row_stage("T", "rope_table", inv_freq=frequencies, factor=rope.attention_factor, out=table)
            self.rope_tables[rope] = table
        return self.rope_tables[rope]


def _embed(low: _Lowering, index: int, op: Op) -> None:
    out, scale = low.allocate(op.outputs[0]), op.attrs["scale"]
    low.add_row_stage("T", "embed", table=Matrix(op.weights["table"]), out=out)
    if scale != 1.0:
        low.add_row_stage("T", "scale", x=out, out=out, factor=scale, width=op.outputs[0].width)


def _linear(low: _Lowering, index: int, op: Op) -> None:
    """A linear with what is fused to it. Its activations are converted by a stage of their own."""
    (x_value, *residuals), (out_value,) = op.inputs, op.outputs
    x, name, rows = low.views[x_value.id], op.weights["weight"], x_value.shape[0]
    scratch = View(low.new_buffer(-(-low.scratch_bytes(name, low.capacity(x_value)) // 4), 0))
    common = {
        "linear": Matrix(name, op.weights.get("bias")),
        "x": x,
        "norm": Vector(op.weights.get("norm")),
        "eps": op.attrs.get("eps", 0.0),
        "scratch": scratch,
        "per_token": rows == "T",
    }
    low.add_row_stage(rows, "linear_prepare", **common)
    residual = low.views[residuals[0].id] if residuals else None
    # not over x, which another thread may still read: see csrc/stages/linear.cpp.
    if residual is None or residual.buffer is x.buffer:
        out = low.allocate(out_value)
    else:
        out = low.reuse_or_allocate(out_value, residuals[0], index)
    gate = op.attrs.get("gate", "")
    if gate and name not in low.gated:
        raise KernelError(f"op fused_linear: the gates of {name} do not lie beside what they gate")
    low.add_wide_stage("linear", **common, out=out, residual=residual, maxima=low.maxima(out_value), gate=gate)


def _split(low: _Lowering, index: int, op: Op) -> None:
    x = low.views[op.inputs[0].id]
    column = x.column
    for value in op.outputs:
        low.bind(value, View(x.buffer, column))
        column += value.width


def _rope(low: _Lowering, index: int, op: Op) -> None:
    rope: Rope = op.attrs["rope"]
    table = low.rope_table(rope)
    for value, out_value in zip(op.inputs[:2], op.outputs):
        x = low.views[value.id]
        out = low.reuse_or_allocate(out_value, value, index)
        heads, pairs = value.width // rope.head_dim, len(rope.inv_freq)
        low.add_row_stage("T", "rope", x=x, out=out, table=table, heads=heads, head_dim=rope.head_dim, pairs=pairs)


def _attention(low: _Lowering, index: int, op: Op) -> None:
    q, k, v = (low.views[value.id] for value in op.inputs)
    layer, window = op.attrs["layer"], op.attrs["window"] or 0
    low.add_row_stage("T", "write_kv", layer=layer, k=k, v=v)
    out = low.allocate(op.outputs[0])
    heads, scale = op.attrs["num_heads"], op.attrs["scale"]
    low.add_wide_stage("attention", layer=layer, q=q, out=out, heads=heads, scale=scale, window=window)


def _rows(low: _Lowering, index: int, op: Op) -> None:
    x, out = low.views[op.inputs[0].id], low.allocate(op.outputs[0])
    low.add_row_stage("R", "rows", x=x, out=out, width=op.outputs[0].width)


def _row_op(low: _Lowering, index: int, op: Op) -> None:
    """A row stage of the same name (csrc/ops) that takes the op's inputs, weights and attributes under their names.

    It may work in place: a row of the result goes over its first input, where that is as wide.
    """
    spec, (out_value,) = OPS[op.kind], op.outputs
    views = dict(zip(spec.inputs, (low.views[value.id] for value in op.inputs)))
    weights = {name: Vector(op.weights.get(name)) for name in (*spec.weights, *spec.optional_weights)}
    first = op.inputs[0]
    same = first.width == out_value.width
    out = low.reuse_or_allocate(out_value, first, index) if same else low.allocate(out_value)
    low.add_row_stage(out_value.shape[0], op.kind, **views, **weights, **op.attrs, out=out, width=out_value.width)


# ops that are more than a row stage of their own name
_HANDLERS: dict[str, Callable[[_Lowering, int, Op], None]] = {
    "embed": _embed,
    "linear": _linear,
    "fused_linear": _linear,
    "split": _split,
    "rope": _rope,
    "attention": _attention,
    "rows": _rows,
}
