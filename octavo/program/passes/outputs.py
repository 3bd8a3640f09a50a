"""``keep_outputs``: a program that computes only what is asked for. A family names all that its model can give."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from octavo.exceptions import ModelError
from octavo.program.program import Op, Program


def keep_outputs(program: Program, *, names: Collection[str] = ("logits",)) -> Program:
    """Without the other outputs, and the ops and weights that served them alone. Raises ModelError.

    Attention stays: it writes the KV cache, which later steps read.
    """
    if missing := [name for name in names if name not in program.outputs]:
        raise ModelError(f"the program has no output {missing[0]!r}, only {', '.join(program.outputs)}")
    outputs = {name: program.outputs[name] for name in names}
    wanted = {value.id for value in outputs.values()}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if op.kind == "attention" or any(value.id in wanted for value in op.outputs):
            kept.append(op)
            wanted.update(value.id for value in op.inputs)
    kept.reverse()
    used = {name for op in kept for name in op.weights.values()}
    weights = {name: spec for name, spec in program.weights.items() if name in used}
    return replace(program, ops=tuple(kept), outputs=outputs, weights=weights)
