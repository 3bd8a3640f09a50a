"""Packing: weights as they came from a file -> panels that kernels read, all in one piece of memory.

Knows nothing of programs; a parameter used twice (tied embeddings) is packed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.backends.cpu import _kernels
from octavo.exceptions import KernelError
from octavo.quantization.base import Weight, Weights, stack_dequantized

# csrc/include/octavo/linear.h: WeightFormat
_FORMATS = {"float32": 0, "bfloat16": 1, "int8_group": 2, "int4_group": 3}
_ALIGNMENT = 4096


@dataclass(slots=True)
class _Layout:
    """How one part will be packed."""

    weight: Weight
    format: int
    n: int
    k: int
    group: int
    has_minimum: bool
    half_scales: bool
    num_bytes: int = 0
    offset: int = 0


class PackedWeights:
    """Matrices as lists of packed parts, vectors as float32 arrays, by parameter name."""

    def __init__(
        self, kernels: _kernels.Kernels, pool: _kernels.ThreadPool, weights: Weights, matrices: set[str]
    ) -> None:
        """Packs the parameters in ``matrices``; the others must be vectors. Raises KernelError naming a parameter."""
        self._layouts: dict[int, list[_Layout]] = {}
        self._key = {name: id(parts) for name, parts in weights.items()}
        self.vectors: dict[str, npt.NDArray[np.float32]] = {}
        total = 0
        for name, parts in weights.items():
            if name not in matrices:
                self.vectors[name] = np.ascontiguousarray(stack_dequantized(parts), dtype=np.float32)
            elif id(parts) not in self._layouts:
                self._layouts[id(parts)] = layouts = [_plan(kernels, name, part) for part in parts]
                for layout in layouts:
                    layout.offset, total = total, total + -(-layout.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = _kernels.Memory(total)
        for layouts in self._layouts.values():
            for layout in layouts:
                _pack(kernels, pool, layout, self._memory.address + layout.offset)

    @property
    def num_bytes(self) -> int:
        """Bytes of packed matrices and of vectors."""
        packed = sum(layout.num_bytes for layouts in self._layouts.values() for layout in layouts)
        return packed + sum(vector.nbytes for vector in self.vectors.values())

    def parts(self, name: str) -> list[_kernels.LinearPart]:
        """The packed parts of a matrix; valid while this object lives."""
        return [
            _kernels.LinearPart(
                layout.format,
                layout.n,
                layout.k,
                layout.group,
                layout.has_minimum,
                layout.half_scales,
                self._memory.address + layout.offset,
            )
            for layout in self._layouts[self._key[name]]
        ]


def _plan(kernels: _kernels.Kernels, name: str, weight: Weight) -> _Layout:
    n, k = weight.shape
    group = weight.group_size
    if weight.scale is not None and (group < 16 or (group != 16 and group % 32) or k % group):
        raise KernelError(f"weight {name}: the CPU kernels have no groups of {group} along {k}")
    scales = [array for array in (weight.scale, weight.minimum) if array is not None]
    layout = _Layout(
        weight,
        _FORMATS[weight.format],
        n,
        k,
        group,
        has_minimum=weight.minimum is not None,
        half_scales=bool(scales) and all(array.dtype == np.float16 for array in scales),
    )
    layout.num_bytes = kernels.packed_bytes(layout.format, n, k, layout.group, layout.has_minimum, layout.half_scales)
    return layout


def _pack(kernels: _kernels.Kernels, pool: _kernels.ThreadPool, layout: _Layout, address: int) -> None:
    weight = layout.weight
    data = np.ascontiguousarray(weight.data)
    scale, minimum = (
        None if array is None else np.ascontiguousarray(array, dtype=np.float32)
        for array in (weight.scale, weight.minimum)
    )
    kernels.pack(
        pool,
        layout.format,
        layout.n,
        layout.k,
        layout.group,
        data.ctypes.data,
        0 if scale is None else scale.ctypes.data,
        0 if minimum is None else minimum.ctypes.data,
        layout.half_scales,
        address,
    )
