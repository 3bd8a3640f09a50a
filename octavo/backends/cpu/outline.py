"""What packing would make of weights, and take meanwhile, by their outlines alone. Packs nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from octavo.backends.cpu import _kernels
from octavo.backends.cpu.packed import Directory, PackedMatrix, PackedVector
from octavo.backends.cpu.weights import can_alternate, match_owners, part_numbers
from octavo.quantization.base import Weights, owners


def outline_directory(
    kernels: _kernels.Kernels,
    weights: Weights,
    shapes: Mapping[str, tuple[int, ...]],
    matrices: Collection[str],
    gates: Collection[str],
) -> Directory:
    """The directory that ``PackedWeights`` makes for these arguments, without places. Raises KernelError as that."""
    _, wanted, packed = match_owners(weights, shapes, matrices, gates)
    directory = Directory({}, {})
    for name, shape in wanted.items():
        if name not in packed:
            directory.vectors[name] = PackedVector(shape[0], 0)
            continue
        parts = weights[name]
        gated = packed[name] and can_alternate(parts)
        whole = (replace(parts[0], shape=shape),) if gated else parts
        numbers = [part_numbers(name, part) for part in whole]
        sizes = [kernels.packed_bytes(_kernels.PartShape(*one)) for one in numbers]
        directory.matrices[name] = [PackedMatrix(*one, 0, size, gated) for one, size in zip(numbers, sizes)]
    return directory


def packing_bytes(weights: Weights, threads: int) -> int:
    """Most bytes that packing holds beside what it has packed: ``threads`` parameters read ahead, and one twice.

    That one is copied while it is converted, or while its gates are made to alternate.
    """
    sizes = [sum(part.held_bytes for part in weights[name]) for name, owner in owners(weights).items() if name == owner]
    return max((size + sum(sizes[i : i + threads + 1]) for i, size in enumerate(sizes)), default=0)
