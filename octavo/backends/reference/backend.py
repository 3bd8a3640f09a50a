"""The reference backend: plain NumPy, slow and obvious, every op of the table.

Weights are dequantised to float32 or float64, and no op is fused. The KV cache has the same type, with the values that
"bfloat16", "int8" or fp8 would leave of K and V. Results are
independent of the batch (see ``ops``). Knows nothing of speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.backends.base import ByteArray, Footprint, Limits, StepInputs
from octavo.backends.identity import code_identity
from octavo.backends.reference import ops
from octavo.backends.sampling import ArrayOutputs
from octavo.config import BackendConfig, KVDtype
from octavo.exceptions import KernelError
from octavo.program import OPS, LayerKV, Op, Program
from octavo.quantization.base import Weights, owners, stack_dequantized


class ReferenceBackend:
    """``dtype`` is float32 or float64: the type of weights, activations and KV cache. Logits are float32 always."""

    name = "reference"

    def __init__(self, config: BackendConfig, dtype: type[np.floating] = np.float32) -> None:
        self._dtype: np.dtype[Any] = np.dtype(dtype)

    def describe(self) -> str:
        return f"reference (NumPy {self._dtype.name}, slow)"

    def kv_bytes(self, layer: LayerKV, kv_dtype: KVDtype = "auto") -> int:
        return layer.width * self._dtype.itemsize

    def footprint(self, program: Program, weights: Weights, limits: Limits) -> Footprint:
        """See ``Backend.footprint``. Activations are an upper estimate: four of the widest values, logits twice."""
        item = self._dtype.itemsize
        sizes = [math.prod(program.weights[name].shape) for name, owner in owners(weights).items() if name == owner]
        widths = [value.width for op in program.ops for value in op.outputs if value.shape[0] == "T"]
        values = limits.max_tokens * sum(sorted(widths)[-4:]) + 2 * limits.max_rows * program.vocab_size
        return Footprint(
            weights=sum(sizes) * item,
            activations=values * item,
            sampling=0,
            packing=4 * max(sizes, default=0) * item,
            kv_block=_block_width(program) * limits.block_size * item,
        )

    def prepare(self, program: Program, weights: Weights, limits: Limits) -> ReferenceRunnable:
        """Dequantise, allocate the cache. Raises KernelError naming an op or a weight that does not fit."""
        for op in program.ops:
            if op.kind not in OPS:
                raise KernelError(f"the reference backend has no op {op.kind!r}")
        arrays: dict[str, np.ndarray] = {}
        by_parts: dict[int, np.ndarray] = {}  # tied parameters share one array
        for name, spec in program.weights.items():
            parts = weights[name]
            if id(parts) not in by_parts:
                by_parts[id(parts)] = stack_dequantized(parts).astype(self._dtype, copy=False)
            arrays[name] = by_parts[id(parts)]
            if arrays[name].shape != spec.shape:
                raise KernelError(f"weight {name} is {arrays[name].shape}, the program wants {spec.shape}")
        return ReferenceRunnable(program, arrays, limits, self._dtype)


class ReferenceRunnable:
    """A prepared model. Rounded numbers stay in ``dtype``.

    ``blocks`` is the memory of the KV cache, [num_blocks, numbers of a block]; ``key_cache`` and ``value_cache`` are
    each layer's parts of it, [num_blocks, block_size, num_kv_heads, key_dim or value_dim].
    """

    def __init__(
        self, program: Program, arrays: dict[str, np.ndarray], limits: Limits, dtype: np.dtype[np.floating]
    ) -> None:
        self.program, self.arrays, self.limits, self.dtype = program, arrays, limits, dtype
        self._store = ops.KV_ROUNDING[limits.kv_dtype]
        self.group_of_layer = program.group_of_layer
        self.blocks = np.zeros((limits.num_blocks, _block_width(program) * limits.block_size), dtype)
        self.key_cache, self.value_cache = _layer_caches(self.blocks, program, limits.block_size)
        last_use = {value.id: n for n, op in enumerate(program.ops) for value in op.inputs}
        last_use.update((value.id, len(program.ops)) for value in program.outputs.values())
        self._dead_after: list[list[int]] = [[] for _ in range(len(program.ops) + 1)]
        for value_id, n in last_use.items():
            self._dead_after[n].append(value_id)

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in {id(a): a for a in self.arrays.values()}.values())

    @property
    def weight_origin(self) -> str:
        return "dequantised"

    def run(self, inputs: StepInputs) -> ArrayOutputs:
        """See ``Runnable.run``. Raises KernelError on sizes beyond the Limits."""
        self._check(inputs)
        values: dict[int, np.ndarray] = {v.id: getattr(inputs, name) for name, v in self.program.inputs.items()}
        for n, op in enumerate(self.program.ops):
            results = _OTHERS.get(op.kind, _array_function)(self, op, [values[v.id] for v in op.inputs], inputs)
            values.update(zip((v.id for v in op.outputs), results if isinstance(results, list) else [results]))
            for value_id in self._dead_after[n]:
                del values[value_id]
        return ArrayOutputs({name: values[v.id].astype(np.float32) for name, v in self.program.outputs.items()})

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.blocks[destination] = self.blocks[source]

    @property
    def block_bytes(self) -> int:
        return self.blocks.shape[1] * self.blocks.itemsize

    @property
    def kv_identity(self) -> str:
        return f"reference {self.dtype} numpy {np.__version__} {code_identity()}"

    def read_blocks(self, block_ids: Sequence[int], out: ByteArray) -> None:
        for row, block_id in zip(out, block_ids, strict=True):
            row.view(self.dtype)[:] = self.blocks[block_id]

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        for row, block_id in zip(data, block_ids, strict=True):
            self.blocks[block_id] = row.view(self.dtype)

    def weight(self, op: Op, parameter: str) -> np.ndarray:
        """The array bound to a parameter of ``op``."""
        return self.arrays[op.weights[parameter]]

    def stored(self, rows: np.ndarray, head_dim: int) -> np.ndarray:
        """What the KV cache keeps of K or V rows [T, heads * head_dim]."""
        return self._store(rows, head_dim)

    def _check(self, inputs: StepInputs) -> None:
        sizes = {
            "tokens": (len(inputs.token_ids), self.limits.max_tokens),
            "logit rows": (len(inputs.logit_rows), self.limits.max_rows),
            "sequences": (len(inputs.seq_lens), self.limits.max_seqs),
            "blocks per sequence": (inputs.block_tables.shape[1], self.limits.max_blocks_per_seq),
        }
        for what, (size, limit) in sizes.items():
            if size > limit:
                raise KernelError(f"{size} {what} in a step planned for {limit}")


def _block_width(program: Program) -> int:
    """Numbers that a block has for a token: those of the widest group."""
    return max(sum(program.kv_layers[layer].width for layer in group.layers) for group in program.kv_groups)


def _layer_caches(
    blocks: np.ndarray, program: Program, block_size: int
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Views of the keys, and of the values, of each layer: a group's layers follow each other, keys before values."""
    keys: dict[int, np.ndarray] = {}
    values: dict[int, np.ndarray] = {}
    for group in program.kv_groups:
        start = 0
        for layer in group.layers:
            kv = program.kv_layers[layer]
            for caches, dim in ((keys, kv.key_dim), (values, kv.value_dim)):
                end = start + block_size * kv.num_heads * dim
                caches[layer] = blocks[:, start:end].reshape(len(blocks), block_size, kv.num_heads, dim)
                start = end
    return keys, values


def _embed(r: ReferenceRunnable, op: Op, x: list[np.ndarray], step: StepInputs) -> np.ndarray:
    scaled: np.ndarray = r.weight(op, "table")[x[0]] * r.dtype.type(op.attrs["scale"])
    return scaled


def _rope(r: ReferenceRunnable, op: Op, x: list[np.ndarray], step: StepInputs) -> list[np.ndarray]:
    rope = op.attrs["rope"]
    return [ops.rope(y, x[2], rope.head_dim, rope.inv_freq, rope.attention_factor) for y in x[:2]]


def _attention(r: ReferenceRunnable, op: Op, x: list[np.ndarray], step: StepInputs) -> np.ndarray:
    layer = op.attrs["layer"]
    group, keys, values = r.group_of_layer[layer], r.key_cache[layer], r.value_cache[layer]
    num_tokens, num_seqs = len(step.token_ids), len(step.seq_lens)
    slots = step.slot_mapping[group * num_tokens : (group + 1) * num_tokens]
    tables = step.block_tables[group * num_seqs : (group + 1) * num_seqs]
    ops.write_kv(keys, r.stored(x[1], op.attrs["key_dim"]), slots)
    ops.write_kv(values, r.stored(x[2], op.attrs["value_dim"]), slots)
    seq_of_row = np.repeat(np.arange(len(step.seq_lens), dtype=np.int32), np.diff(step.query_start_loc))
    scale, window = op.attrs["scale"], op.attrs["window"]
    return ops.paged_attention(x[0], keys, values, tables, seq_of_row, step.positions, scale, window)


def _array_function(r: ReferenceRunnable, op: Op, x: list[np.ndarray], step: StepInputs) -> Any:
    """An op that is a function of the same name in ``ops``: of its inputs, its weights and its attributes."""
    return getattr(ops, op.kind)(*x, **{name: r.weight(op, name) for name in op.weights}, **op.attrs)


_OTHERS = {"embed": _embed, "rope": _rope, "attention": _attention}
