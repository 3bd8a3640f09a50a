"""Fusion: ops of a Program that one native stage does together. Knows neither phases nor memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from octavo.program import Op, Program, Value

_GATES = ("silu_mul", "gelu_mul")


@dataclass(frozen=True, slots=True)
class Node:
    """An op, with the ops that melted into it if it is a linear; its inputs and outputs are those of all together.

    ``norm``: the rms_norm before it; ``gate``: the kind of the gate after it, or ""; ``residual``: what its result is
    added to.
    """

    op: Op
    norm: Op | None = None
    gate: str = ""
    residual: Value | None = None

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.op.inputs if self.residual is None else (*self.op.inputs, self.residual)


def fuse(program: Program, gated: Collection[str] = ()) -> list[Node]:
    """The ops as nodes. ``gated``: names among ``gate_matrices`` whose gates lie beside what they gate."""
    readers = _readers(program)
    nodes = _fuse_norms([Node(op) for op in program.ops], readers)
    nodes = _fuse_gates(nodes, readers, gated)
    return _fuse_residuals(nodes, readers)


def gate_matrices(program: Program) -> set[str]:
    """Matrices of linears without bias of which nothing but a gate reads the result."""
    readers = _readers(program)
    found: set[str] = set()
    others: set[str] = set()
    for op in program.ops:
        name = op.weights.get("weight", op.weights.get("table"))
        if name is None:
            continue
        is_gate = op.kind == "linear" and "bias" not in op.weights and _only_reader(op, readers) in _GATES
        (found if is_gate else others).add(name)
    return found - others


Readers = dict[int, list[str]]  # value id -> kinds of the ops that read it


def _readers(program: Program) -> Readers:
    readers: Readers = defaultdict(list)
    for op in program.ops:
        for value in op.inputs:
            readers[value.id].append(op.kind)
    readers[program.logits.id].append("logits")
    return readers


def _only_reader(op: Op, readers: Readers) -> str | None:
    kinds = readers[op.outputs[0].id]
    return kinds[0] if len(kinds) == 1 else None


def _fuse_norms(nodes: Sequence[Node], readers: Readers) -> list[Node]:
    """``linear(rms_norm(x))`` where only linears read the norm: each of them norms its input itself."""
    norms: dict[int, Op] = {}
    fused = []
    for node in nodes:
        op = node.op
        if op.kind == "rms_norm" and op.attrs["groups"] == 1 and set(readers[op.outputs[0].id]) == {"linear"}:
            norms[op.outputs[0].id] = op
        elif op.kind == "linear" and op.inputs[0].id in norms:
            norm = norms[op.inputs[0].id]
            fused.append(replace(node, op=replace(op, inputs=norm.inputs), norm=norm))
        else:
            fused.append(node)
    return fused


def _fuse_gates(nodes: Sequence[Node], readers: Readers, gated: Collection[str]) -> list[Node]:
    """``gate(linear(x))`` where the linear's matrix is one of ``gated``."""
    linears: dict[int, Node] = {}
    fused = []
    for node in nodes:
        op = node.op
        if op.kind == "linear" and op.weights["weight"] in gated and _only_reader(op, readers) in _GATES:
            linears[op.outputs[0].id] = node
        elif op.kind in _GATES and op.inputs[0].id in linears:
            linear = linears[op.inputs[0].id]
            fused.append(replace(linear, op=replace(linear.op, outputs=op.outputs), gate=op.kind))
        else:
            fused.append(node)
    return fused


def _fuse_residuals(nodes: Sequence[Node], readers: Readers) -> list[Node]:
    """``add(x, linear(h))`` where nothing else reads the linear's result."""
    linears = {
        node.op.outputs[0].id: node
        for node in nodes
        if node.op.kind == "linear" and not node.gate and _only_reader(node.op, readers) == "add"
    }
    fused: list[Node] = []
    for node in nodes:
        op, linear = node.op, None
        if op.kind == "add":
            a, b = op.inputs
            linear, other = (linears.pop(b.id), a) if b.id in linears else (linears.pop(a.id, None), b)
        if linear is None:
            fused.append(node)
            continue
        fused.remove(linear)
        fused.append(replace(linear, op=replace(linear.op, outputs=op.outputs), residual=other))
    return fused
