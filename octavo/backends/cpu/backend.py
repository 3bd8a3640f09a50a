"""CpuBackend: picks the kernels of this machine, packs weights, builds the native program.

Knows nothing of schedulers or models; a step is one call into C++ with the GIL released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.backends.base import (
    BitArray,
    ByteArray,
    FloatArray,
    Footprint,
    Limits,
    RowChoice,
    SampledRows,
    SampleRows,
    StepInputs,
)
from octavo.backends.cpu import _kernels
from octavo.backends.cpu.buffers import View
from octavo.backends.cpu.lowering import LoweredProgram, Matrix, Vector, lower
from octavo.backends.cpu.outline import outline_directory, packing_bytes
from octavo.backends.cpu.packed import Directory, as_bytes
from octavo.backends.cpu.packed_cache import PackedCache
from octavo.backends.cpu.weights import PackedWeights
from octavo.backends.identity import code_identity
from octavo.config import BackendConfig, KVDtype
from octavo.exceptions import KernelError
from octavo.platforms.cpu import CpuPlatform
from octavo.program import LayerKV, Program
from octavo.program.passes.fuse import gate_matrices
from octavo.quantization.base import Weights, owners

_MOST_INT8_KEY_DIM = 512  # 512 products of 127 x 32767 are the last that cannot overflow
_EIGHT_BITS = ("int8", "fp8_e4m3", "fp8_e5m2")  # KV dtypes, with a float32 scale for K and for V of a token and head
_SCALE = 4  # bytes
_MATRICES = {"embed": "table", "linear": "weight", "fused_linear": "weight"}  # ops with a matrix: its parameter

# csrc/include/octavo/attention.h, csrc/program/attention_plan.cpp
_TILE_ROWS, _PARTITION, _TASKS_PER_THREAD, _MOST_PARTIAL_BYTES = 48, 512, 4, 16 << 20
_SAMPLER_ROWS = 5  # float32 rows of logits that a thread's sampler keeps: RowSampler of csrc/program/sampler.cpp


class CpuBackend:
    """C++ kernels, KV cache in bfloat16, int8 or fp8. Results do not depend on ``threads``.

    ``isa`` ("avx512", "avx2", "portable") overrides the choice by CPU; KernelError where it cannot run.
    """

    name = "cpu"

    def __init__(self, config: BackendConfig, *, isa: str = "") -> None:
        try:
            self._kernels = _kernels.Kernels(isa)
        except ValueError as error:
            raise KernelError(str(error)) from None
        self._threads = config.threads or CpuPlatform().num_threads()
        folder = config.weights_cache_dir if config.weights_cache else None
        self._packed_cache = PackedCache(folder, self._threads) if folder else None
        self._lowered: tuple[tuple[Any, ...], LoweredProgram] | None = None  # the last one, and what it was made for

    def describe(self) -> str:
        threads = self._threads
        return f"{self._kernels.isa} ({self._kernels.features}), {threads} thread{'s' if threads > 1 else ''}"

    def kv_bytes(self, layer: LayerKV, kv_dtype: KVDtype = "auto") -> int:
        if kv_dtype not in _EIGHT_BITS:
            return 2 * layer.width
        return layer.width + 2 * layer.num_heads * _SCALE

    def footprint(self, program: Program, weights: Weights, limits: Limits) -> Footprint:
        """See ``Backend.footprint``. Exact but for scratch memory and packing, which are upper estimates."""
        _check(program, limits)
        directory = outline_directory(self._kernels, weights, *_parameters(program))
        lowered = self._lower(program, limits, directory, owners(weights))
        return Footprint(
            weights=directory.num_bytes,
            activations=4 * lowered.arena_floats + self._attention_bytes(program, limits),
            sampling=self._threads * 4 * _SAMPLER_ROWS * program.vocab_size,
            packing=packing_bytes(weights, self._threads),
            kv_block=_kernels.block_bytes(_kv_layers(program), limits.block_size, _kv_format(limits)),
        )

    def prepare(self, program: Program, weights: Weights, limits: Limits) -> CpuRunnable:
        """Pack, plan, build. Raises KernelError naming an op, weight or size that has no kernel."""
        _check(program, limits)
        pool = _kernels.ThreadPool(self._threads)
        shapes, matrices, gates = _parameters(program)
        packed = PackedWeights(self._kernels, pool, weights, shapes, matrices, self._packed_cache, gates)
        lowered = self._lower(program, limits, packed.directory, packed.owners)
        native = self._new_program(pool, program, limits, lowered.arena_floats)
        _build(native, lowered, packed)
        self._lowered = None
        outputs = {
            name: Output(lowered.outputs[name].place, value.width, value.shape[0] == "T")
            for name, value in program.outputs.items()
        }
        step = CpuOutputs(native, outputs, _kernels.Sampler(pool, self._kernels.isa))
        return CpuRunnable(native, packed, limits, step, self._kernels.isa)

    def _lower(
        self, program: Program, limits: Limits, directory: Directory, owner: Mapping[str, str]
    ) -> LoweredProgram:
        """For weights of these shapes; what ``footprint`` lowered serves ``prepare`` too, where they are the same."""

        def scratch_bytes(name: str, rows: int) -> int:
            parts = [_kernels.LinearPart(part.shape(), 0) for part in directory.matrices[owner[name]]]
            return self._kernels.scratch_bytes(parts, rows)

        gated = directory.gated(owner)
        shapes = {name: [part.numbers for part in parts] for name, parts in directory.matrices.items()}
        key = (program, limits.max_tokens, limits.max_rows, gated, shapes)
        if self._lowered is None or self._lowered[0][0] is not program or self._lowered[0][1:] != key[1:]:
            self._lowered = key, lower(program, limits, scratch_bytes, self._kernels.row_ops, gated)
        return self._lowered[1]

    def _attention_bytes(self, program: Program, limits: Limits) -> int:
        """An upper estimate: a tile of rows for each thread, and partial results of split tasks, which are few."""
        attention = [op.attrs for op in program.ops if op.kind == "attention"]
        rows = max([_TILE_ROWS, *(attrs["num_heads"] // attrs["num_kv_heads"] for attrs in attention)])
        dims = [max(attrs["key_dim"], attrs["value_dim"]) for attrs in attention]
        dim = -(-max(dims, default=0) // 16) * 16
        partitions = -(-limits.max_blocks_per_seq * limits.block_size // _PARTITION)
        partials = 4 * (_TASKS_PER_THREAD * self._threads) * rows * partitions * (dim + 2)
        return self._threads * 16 * rows * (dim + 64) + min(_MOST_PARTIAL_BYTES, partials)

    def _new_program(
        self, pool: _kernels.ThreadPool, program: Program, limits: Limits, arena_floats: int
    ) -> _kernels.Program:
        return _kernels.Program(
            self._kernels,
            pool,
            tokens=limits.max_tokens,
            rows=limits.max_rows,
            sequences=limits.max_seqs,
            blocks_per_seq=limits.max_blocks_per_seq,
            blocks=limits.num_blocks,
            block_size=limits.block_size,
            vocab_size=program.vocab_size,
            max_position=program.max_position,
            kv_layers=_kv_layers(program),
            groups=len(program.kv_groups),
            arena_floats=arena_floats,
            kv_format=_kv_format(limits),
        )


@dataclass(frozen=True, slots=True)
class Output:
    """Where an output lies: ``place`` as a View has it; rows of ``width`` numbers, one for each token or logit row."""

    place: tuple[int, int]
    width: int
    per_token: bool


class CpuOutputs:
    """Outputs of the native program's last step, and its sampler; see ``StepOutputs``."""

    def __init__(self, native: _kernels.Program, outputs: Mapping[str, Output], sampler: _kernels.Sampler) -> None:
        self._native, self._outputs, self._sampler = native, outputs, sampler

    def rows(self, output: str, chosen: RowChoice = slice(None)) -> FloatArray:
        if output not in self._outputs:
            raise KernelError(f"the program has no output {output!r}")
        place = self._outputs[output]
        rows: FloatArray = self._native.rows_at(place.place, place.width, place.per_token)[chosen]
        return rows

    def sample(self, rows: SampleRows, adjusted: FloatArray | None, masks: BitArray | None) -> SampledRows:
        """See ``StepOutputs.sample``: one native call for all rows, on the backend's threads."""
        if "logits" not in self._outputs:
            raise KernelError("the program has no output 'logits'")
        out = SampledRows.empty(rows)
        data = rows.view(np.uint8)
        try:
            self._sampler.sample_step(
                self._native, adjusted, masks, data, out.token_ids, out.ranks, out.logprob_ids, out.logprobs
            )
        except (ValueError, TypeError) as error:
            raise KernelError(str(error)) from None
        return out


class CpuRunnable:
    """A prepared model: native program, packed weights, KV cache."""

    def __init__(
        self, native: _kernels.Program, packed: PackedWeights, limits: Limits, outputs: CpuOutputs, isa: str
    ) -> None:
        self._native, self._packed, self.limits, self._outputs = native, packed, limits, outputs
        self._isa = isa
        self._blocks = as_bytes(native.kv_address, native.kv_bytes).reshape(-1, native.block_bytes)

    @property
    def weight_bytes(self) -> int:
        return self._packed.num_bytes

    @property
    def weight_origin(self) -> str:
        return self._packed.origin

    def run(self, inputs: StepInputs) -> CpuOutputs:
        """See ``Runnable.run``: rows of outputs are views that the next call overwrites.

        Raises KernelError, before anything is written, when sizes exceed the Limits or an index points outside.
        """
        try:
            self._native.run(
                inputs.token_ids,
                inputs.positions,
                inputs.slot_mapping,
                inputs.query_start_loc,
                inputs.seq_lens,
                inputs.block_tables,
                inputs.logit_rows,
            )
        except (ValueError, TypeError, BufferError) as error:
            raise KernelError(str(error)) from None
        return self._outputs

    def measure(self, on: bool = True) -> None:
        """Start to time the phases of steps, or stop; see ``measurements``."""
        self._native.measure(on)

    def measurements(self) -> list[tuple[str, float]]:
        """(what a phase does, seconds in all steps since ``measure``) in order; waiting for other threads included."""
        return self._native.measurements()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Runnable.copy_blocks``. Raises KernelError, and copies nothing, for a block that does not exist."""
        try:
            self._native.copy_blocks(list(pairs))
        except ValueError as error:
            raise KernelError(str(error)) from None

    @property
    def block_bytes(self) -> int:
        return self._native.block_bytes

    @property
    def kv_identity(self) -> str:
        return f"{self._isa} {code_identity()}"

    def read_blocks(self, block_ids: Sequence[int], out: ByteArray) -> None:
        self._check_blocks(block_ids)
        for row, block_id in zip(out, block_ids, strict=True):
            row[:] = self._blocks[block_id]

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        self._check_blocks(block_ids)
        for row, block_id in zip(data, block_ids, strict=True):
            self._blocks[block_id] = row

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        if not all(0 <= block_id < len(self._blocks) for block_id in block_ids):
            raise KernelError(f"KV blocks {list(block_ids)}: there are {len(self._blocks)}")


def _check(program: Program, limits: Limits) -> None:
    """Raises KernelError, naming the layer, for sizes that attention has no kernel for."""
    for layer, kv in enumerate(program.kv_layers):
        if kv.key_dim % 2:
            raise KernelError(f"layer {layer}: keys of {kv.key_dim} numbers are odd; attention works on pairs")
        if limits.kv_dtype == "int8" and kv.key_dim > _MOST_INT8_KEY_DIM:
            raise KernelError(f"layer {layer}: keys of {kv.key_dim}: int8 KV sums in int32, up to {_MOST_INT8_KEY_DIM}")


def _kv_layers(program: Program) -> list[tuple[int, int, int, int]]:
    """(group, KV heads, key_dim, value_dim) of each layer."""
    groups = program.group_of_layer
    return [(groups[n], kv.num_heads, kv.key_dim, kv.value_dim) for n, kv in enumerate(program.kv_layers)]


def _kv_format(limits: Limits) -> str:
    return "bfloat16" if limits.kv_dtype == "auto" else limits.kv_dtype


def _parameters(program: Program) -> tuple[dict[str, tuple[int, ...]], set[str], set[str]]:
    """Shapes of the parameters, which of them are matrices, and which of these are gates."""
    matrices = {op.weights[_MATRICES[op.kind]] for op in program.ops if op.kind in _MATRICES}
    return {name: spec.shape for name, spec in program.weights.items()}, matrices, gate_matrices(program)


def _build(native: _kernels.Program, lowered: LoweredProgram, packed: PackedWeights) -> None:
    """Emit the stages, with places for views and numbers or addresses for weights."""
    linears: dict[tuple[str, str | None], int] = {}

    def linear(name: str, bias: str | None = None) -> int:
        if (name, bias) not in linears:
            address = packed.vector(bias).ctypes.data if bias else 0
            linears[name, bias] = native.add_weights(packed.parts(name), address)
        return linears[name, bias]

    def resolve(arg: Any) -> Any:
        if isinstance(arg, View):
            return arg.place
        if isinstance(arg, Matrix):
            return linear(arg.name, arg.bias)
        if isinstance(arg, Vector):
            return 0 if arg.name is None else packed.vector(arg.name).ctypes.data
        return arg

    for phase in lowered.phases:
        if phase.rows is not None:
            native.begin_rows(phase.rows == "T")
        for stage in phase.stages:
            native.add(stage.kind, {key: resolve(arg) for key, arg in stage.args.items()})
    if "logits" in lowered.outputs:
        native.set_logits(lowered.outputs["logits"].place)
