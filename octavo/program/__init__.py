"""The model as a program: an op table, a builder and the immutable result. Knows no weights' bytes and no kernels."""

from octavo.program.builder import ProgramBuilder
from octavo.program.kv import KVGroup, LayerKV
from octavo.program.ops import OPS, OpSpec
from octavo.program.program import Op, Program, Rope, Value, WeightSpec

__all__ = ["OPS", "KVGroup", "LayerKV", "Op", "OpSpec", "Program", "ProgramBuilder", "Rope", "Value", "WeightSpec"]
