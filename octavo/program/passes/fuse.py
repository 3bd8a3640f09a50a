"""``fuse``: linears take over the norm before them, the gate or the residual after them, as ``fused_linear`` ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from octavo.program.program import Op, Program, Value

_GATES = ("silu_mul", "gelu_mul")
_LINEARS = ("linear", "fused_linear")
Readers = dict[int, list[str]]  # value id -> kinds of the ops that read it


def fuse(program: Program, *, gated: Collection[str] = ()) -> Program:
    """``gated``: names among ``gate_matrices`` whose gates lie beside what they gate."""
    readers = _readers(program)
    ops = _fuse_norms(program.ops, readers)
    ops = _fuse_gates(ops, readers, gated)
    return replace(program, ops=tuple(_fuse_residuals(ops, readers)))


def gate_matrices(program: Program) -> set[str]:
    """Matrices of linears without bias of which nothing but a gate reads the result, or that a gate is fused to."""
    readers = _readers(program)
    found: set[str] = set()
    others: set[str] = set()
    for op in program.ops:
        name = op.weights.get("weight", op.weights.get("table"))
        if name is None:
            continue
        is_gate = op.kind == "linear" and "bias" not in op.weights and _only_reader(op, readers) in _GATES
        is_gate = is_gate or bool(op.attrs.get("gate"))
        (found if is_gate else others).add(name)
    return found - others


def _readers(program: Program) -> Readers:
    readers: Readers = defaultdict(list)
    for op in program.ops:
        for value in op.inputs:
            readers[value.id].append(op.kind)
    for name, value in program.outputs.items():
        readers[value.id].append(f"output {name}")
    return readers


def _only_reader(op: Op, readers: Readers) -> str | None:
    kinds = readers[op.outputs[0].id]
    return kinds[0] if len(kinds) == 1 else None


def _fused(
    op: Op,
    *,
    inputs: tuple[Value, ...] | None = None,
    outputs: tuple[Value, ...] | None = None,
    norm: Op | None = None,
    gate: str = "",
) -> Op:
    """``op``, a linear or one that is fused already, with more in it."""
    weights: dict[str, str] = dict(op.weights)
    attrs: dict[str, Any] = {"eps": 0.0, "gate": "", **op.attrs}
    if norm is not None:
        weights["norm"], attrs["eps"] = norm.weights["weight"], norm.attrs["eps"]
    if gate:
        attrs["gate"] = gate
    return Op("fused_linear", inputs or op.inputs, outputs or op.outputs, weights, attrs)


def _fuse_norms(ops: Sequence[Op], readers: Readers) -> list[Op]:
    """``linear(rms_norm(x))`` where only linears read the norm: each of them norms its input itself."""
    norms: dict[int, Op] = {}
    fused = []
    for op in ops:
        if op.kind == "rms_norm" and op.attrs["groups"] == 1 and set(readers[op.outputs[0].id]) == {"linear"}:
            norms[op.outputs[0].id] = op
        elif op.kind == "linear" and op.inputs[0].id in norms:
            norm = norms[op.inputs[0].id]
            fused.append(_fused(op, inputs=norm.inputs, norm=norm))
        else:
            fused.append(op)
    return fused


def _fuse_gates(ops: Sequence[Op], readers: Readers, gated: Collection[str]) -> list[Op]:
    """``gate(linear(x))`` where the linear's matrix is one of ``gated``."""
    linears: dict[int, Op] = {}
    fused = []
    for op in ops:
        if op.kind in _LINEARS and op.weights["weight"] in gated and _only_reader(op, readers) in _GATES:
            linears[op.outputs[0].id] = op
        elif op.kind in _GATES and op.inputs[0].id in linears:
            fused.append(_fused(linears[op.inputs[0].id], outputs=op.outputs, gate=op.kind))
        else:
            fused.append(op)
    return fused


def _fuse_residuals(ops: Sequence[Op], readers: Readers) -> list[Op]:
    """``add(x, linear(h))`` where nothing else reads the linear's result."""
    linears = {
        op.outputs[0].id: op
        for op in ops
        if op.kind in _LINEARS and not op.attrs.get("gate") and _only_reader(op, readers) == "add"
    }
    fused: list[Op] = []
    for op in ops:
        linear = None
        if op.kind == "add":
            a, b = op.inputs
            linear, other = (linears.pop(b.id), a) if b.id in linears else (linears.pop(a.id, None), b)
        if linear is None:
            fused.append(op)
            continue
        fused.remove(linear)
        fused.append(_fused(linear, inputs=(*linear.inputs, other), outputs=op.outputs))
    return fused
