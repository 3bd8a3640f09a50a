"""Lowering: a Program's ops -> phases of native stages on planned buffers.

Row stages (each row alone) share a phase as long as nothing makes them wait for other rows; linears and attention are
wide: a phase each. Rope and residuals work in place where nobody reads the old value again. Knows no addresses and no
packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.backends.base import Limits
from octavo.backends.cpu.buffers import Buffer, View, plan_arena
from octavo.backends.cpu.fusion import Node, fuse
from octavo.exceptions import KernelError
from octavo.program import Program, Rope, Value


@dataclass(frozen=True, slots=True)
class Stage:
    """A call of the native Program's ``add_<kind>``; Views among ``args`` become places."""

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
    logits: View
    arena_floats: int


def lower(
    program: Program, limits: Limits, scratch_bytes: Callable[[str, int], int], gated: Collection[str] = ()
) -> LoweredProgram:
    """Lower ``program`` for steps within ``limits``.

    ``scratch_bytes(weight name, rows)`` is what a linear needs for converted activations; ``gated``: see
    ``fusion.fuse``. Raises KernelError naming an op that has no kernel.
    """
    lowering = _Lowering(fuse(program, gated), program, limits, scratch_bytes)
    for index, node in enumerate(lowering.nodes):
        handler = _HANDLERS.get(node.op.kind)
        if handler is None:
            raise KernelError(f"the CPU backend has no op {node.op.kind!r}")
        handler(lowering, index, node)
    logits = lowering.views[program.logits.id]
    for buffer in (logits.buffer, *lowering.kept):
        buffer.touch(len(lowering.phases))
    return LoweredProgram(lowering.phases, logits, plan_arena(lowering.buffers))


class _Lowering:
    """State of one lowering: phases so far, and where each value lies."""

    def __init__(
        self, nodes: Sequence[Node], program: Program, limits: Limits, scratch_bytes: Callable[[str, int], int]
    ) -> None:
        self.nodes, self.logits, self.limits, self.scratch_bytes = nodes, program.logits, limits, scratch_bytes
        self.phases: list[Phase] = []
        self.buffers: list[Buffer] = []
        self.kept: list[Buffer] = []  # read after the step, besides the logits
        self.views: dict[int, View] = {}
        self.rope_tables: dict[Rope, View] = {}
        self._values: dict[Buffer, list[Value]] = {}
        self._last_use: dict[int, int] = {}
        for index, node in enumerate(nodes):
            for value in node.reads:
                self._last_use[value.id] = index
        self._last_use[program.logits.id] = len(nodes)

    def capacity(self, value: Value) -> int:
        """Most rows a value can have."""
        return self.limits.max_tokens if value.shape[0] == "T" else self.limits.max_rows

    def new_buffer(self, floats: int, stride: int) -> Buffer:
        buffer = Buffer(floats, stride)
        self.buffers.append(buffer)
        return buffer

    def maxima(self, value: Value) -> View | None:
        """Room for the maxima (csrc/include/octavo/maxima.h) of ``value``, if that is the logits."""
        if value.id != self.logits.id:
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
        """The place of ``old`` if nobody reads it, or a value lying over it, after node ``index``; else a new one."""
        view = self.views[old.id]
        start, end = view.column, view.column + old.width
        for other in self._values[view.buffer]:
            column = self.views[other.id].column
            overlaps = column < end and start < column + other.width
            if overlaps and self._last_use.get(other.id, -1) > index:
                return self.allocate(value)
        return self.bind(value, view)

    def add_row_stage(self, rows: Any, kind: str, views: Iterable[View], **args: Any) -> None:
        """Append a row stage over ``rows`` ("T" or "R") that touches ``views``."""
        if not self.phases or self.phases[-1].rows != rows:
            self.phases.append(Phase(rows))
        self._append(kind, views, args)

    def add_wide_stage(self, kind: str, views: Iterable[View], **args: Any) -> None:
        """Append a wide stage that touches ``views``."""
        self.phases.append(Phase(None))
        self._append(kind, views, args)

    def _append(self, kind: str, views: Iterable[View], args: dict[str, Any]) -> None:
        for view in views:
            view.buffer.touch(len(self.phases) - 1)
        self.phases[-1].stages.append(Stage(kind, args))

    def rope_table(self, rope: Rope) -> View:
        """Cosines and sines of the step's positions; made once, in the first place that needs them."""
        if rope not in self.rope_tables:
            width = 2 * len(rope.inv_freq)
            table = View(self.new_buffer(self.limits.max_tokens * width, width))
            self.add_row_stage(
                "T", "rope_table", [table], inv_freq=list(rope.inv_freq), factor=rope.attention_factor, out=table
            )
            self.rope_tables[rope] = table
        return self.rope_tables[rope]


def _embed(low: _Lowering, index: int, node: Node) -> None:
    out = low.allocate(node.op.outputs[0])
    low.add_row_stage("T", "embed", [out], table=node.op.weights["table"], scale=node.op.attrs["scale"], out=out)


def _linear(low: _Lowering, index: int, node: Node) -> None:
    (x_value,), (out_value,) = node.op.inputs, node.op.outputs
    x, name, rows = low.views[x_value.id], node.op.weights["weight"], x_value.shape[0]
    scratch = View(low.new_buffer(-(-low.scratch_bytes(name, low.capacity(x_value)) // 4), 0))
    common = {
        "linear": (name, node.op.weights.get("bias")),
        "x": x,
        "norm": node.norm.weights["weight"] if node.norm else None,
        "eps": node.norm.attrs["eps"] if node.norm else 0.0,
        "scratch": scratch,
        "per_token": rows == "T",
    }
    low.add_row_stage(rows, "linear_prepare", [x, scratch], **common)
    residual = None if node.residual is None else low.views[node.residual.id]
    # not over x, which another thread may still read: see LinearStage.
    if node.residual is None or low.views[node.residual.id].buffer is x.buffer:
        out = low.allocate(out_value)
    else:
        out = low.reuse_or_allocate(out_value, node.residual, index)
    maxima = low.maxima(out_value)
    touched = [x, scratch, out, *(view for view in (residual, maxima) if view is not None)]
    low.add_wide_stage("linear", touched, **common, out=out, residual=residual, maxima=maxima, gate=node.gate)


def _rms_norm(low: _Lowering, index: int, node: Node) -> None:
    (x_value,), (out_value,) = node.op.inputs, node.op.outputs
    x = low.views[x_value.id]
    out = low.reuse_or_allocate(out_value, x_value, index)
    width = x_value.width // node.op.attrs["groups"]
    args = {"weight": node.op.weights["weight"], **node.op.attrs, "width": width}
    low.add_row_stage(x_value.shape[0], "rms_norm", [x, out], x=x, out=out, **args)


def _add(low: _Lowering, index: int, node: Node) -> None:
    a, b = (low.views[value.id] for value in node.op.inputs)
    out_value = node.op.outputs[0]
    out = low.reuse_or_allocate(out_value, node.op.inputs[0], index)
    low.add_row_stage(out_value.shape[0], "add", [a, b, out], a=a, b=b, out=out, width=out_value.width)


def _split(low: _Lowering, index: int, node: Node) -> None:
    x = low.views[node.op.inputs[0].id]
    column = x.column
    for value in node.op.outputs:
        low.bind(value, View(x.buffer, column))
        column += value.width


def _rope(low: _Lowering, index: int, node: Node) -> None:
    rope: Rope = node.op.attrs["rope"]
    table = low.rope_table(rope)
    for value, out_value in zip(node.op.inputs[:2], node.op.outputs):
        x = low.views[value.id]
        out = low.reuse_or_allocate(out_value, value, index)
        heads, pairs = value.width // rope.head_dim, len(rope.inv_freq)
        args = {"heads": heads, "head_dim": rope.head_dim, "pairs": pairs}
        low.add_row_stage("T", "rope", [x, out, table], x=x, out=out, table=table, **args)


def _attention(low: _Lowering, index: int, node: Node) -> None:
    q, k, v = (low.views[value.id] for value in node.op.inputs)
    attrs = node.op.attrs
    low.add_row_stage("T", "write_kv", [k, v], layer=attrs["layer"], k=k, v=v)
    out = low.allocate(node.op.outputs[0])
    how = {"layer": attrs["layer"], "heads": attrs["num_heads"], "scale": attrs["scale"], "window": attrs["window"]}
    low.add_wide_stage("attention", [q, out], q=q, out=out, **how)


def _gated(low: _Lowering, index: int, node: Node) -> None:
    x = low.views[node.op.inputs[0].id]
    out_value = node.op.outputs[0]
    out = low.allocate(out_value)
    low.add_row_stage(out_value.shape[0], node.op.kind, [x, out], x=x, out=out, width=out_value.width)


def _rows(low: _Lowering, index: int, node: Node) -> None:
    x = low.views[node.op.inputs[0].id]
    out_value = node.op.outputs[0]
    out = low.allocate(out_value)
    low.add_row_stage("R", "gather", [x, out], x=x, out=out, width=out_value.width)


_HANDLERS: dict[str, Callable[[_Lowering, int, Node], None]] = {
    "embed": _embed,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add": _add,
    "split": _split,
    "rope": _rope,
    "attention": _attention,
    "silu_mul": _gated,
    "gelu_mul": _gated,
    "rows": _rows,
}
