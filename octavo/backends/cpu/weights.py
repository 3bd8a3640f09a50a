"""Packing: weights as they came from a file -> panels that kernels read.

One parameter at a time, so that a large model never lies in memory twice; a parameter used twice (tied embeddings) is
packed once. Panels packed by an earlier start are taken from ``packed_cache``. Knows nothing of programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo.backends.cpu import _kernels
from octavo.backends.cpu.packed import Directory, PackedMatrix, PackedVector, Pieces, as_bytes
from octavo.backends.cpu.packed_cache import PackedCache
from octavo.exceptions import KernelError
from octavo.quantization.base import LazyWeights, Weight, Weights, owners, stack_dequantized

# csrc/include/octavo/linear.h: WeightFormat of floats (that of groups is their bits), ScaleKind
_FLOATS = {"float32": 0, "bfloat16": 1}
_SCALE_KINDS = {"f4": 0, "f2": 1, "i1": 2}


class PackedWeights:
    """Matrices as lists of packed parts, vectors as float32 arrays, by parameter name.

    ``shapes``: the parameters and the shapes they must have. Those in ``matrices`` are packed, the others must be
    vectors. ``cache``: where packed weights are kept between starts. ``gates``: matrices [gate | up] of which 16 rows
    of the one and 16 of the other shall alternate; they do where both are of one format (``Directory.gated``).
    Raises KernelError naming a parameter.
    """

    def __init__(
        self,
        kernels: _kernels.Kernels,
        pool: _kernels.ThreadPool,
        weights: Weights,
        shapes: Mapping[str, tuple[int, ...]],
        matrices: Collection[str],
        cache: PackedCache | None = None,
        gates: Collection[str] = (),
    ) -> None:
        self._owners, wanted, packed = match_owners(weights, shapes, matrices, gates)
        self._slot = slot = (
            cache.slot(weights, f"{kernels.isa} {sorted(packed.items())}") if cache is not None else None
        )
        found = slot.read(lambda directory: _fits(directory, wanted, packed, kernels)) if slot is not None else None
        self.origin = "packed now" if found is None else "read from the cache"
        self.directory, self._memory = found or _pack_all(kernels, pool, weights, wanted, packed)
        if slot is not None and found is None:
            slot.write(weights, self.directory, self._memory)
        self._vectors = {
            name: as_bytes(self._memory.address(vector.offset), vector.size * 4).view(np.float32)
            for name, vector in self.directory.vectors.items()
        }

    @property
    def owners(self) -> Mapping[str, str]:
        """Parameter -> its name in the directory."""
        return self._owners

    @property
    def num_bytes(self) -> int:
        """Bytes of packed matrices and of vectors."""
        return self.directory.num_bytes

    def address(self, offset: int) -> int:
        """Where ``offset`` of the directory is; valid while this object lives."""
        return self._memory.address(offset)

    def wait_kept(self) -> None:
        """Until the cache, if it had to be written, is."""
        if self._slot is not None:
            self._slot.wait()

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A vector; valid while this object lives."""
        return self._vectors[self._owners[name]]

    def parts(self, name: str) -> list[_kernels.LinearPart]:
        """The packed parts of a matrix; valid while this object lives."""
        return [
            _kernels.LinearPart(part.shape(), self._memory.address(part.offset))
            for part in self.directory.matrices[self._owners[name]]
        ]


def match_owners(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], matrices: Collection[str], gates: Collection[str]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]], dict[str, bool]]:
    """Parameter -> owner; the owners' shapes; owners that are matrices -> whether all that share them are gates.

    Raises KernelError for a parameter that is missing.
    """
    if missing := [name for name in shapes if name not in weights]:
        raise KernelError(f"weight {missing[0]} is missing")
    owner = owners(weights)
    packed: dict[str, bool] = {}
    for name in matrices:
        packed[owner[name]] = packed.get(owner[name], True) and name in gates
    return owner, {owner[name]: shape for name, shape in shapes.items()}, packed


def _pack_all(
    kernels: _kernels.Kernels,
    pool: _kernels.ThreadPool,
    weights: Weights,
    wanted: Mapping[str, tuple[int, ...]],
    matrices: Mapping[str, bool],
) -> tuple[Directory, Pieces]:
    directory, memory = Directory({}, {}), Pieces()
    for name, parts in _read_ahead(weights, list(wanted), pool.threads):
        shape = wanted[name]
        _check_shape(name, [part.shape for part in parts], shape)
        if name in matrices:
            gated = matrices[name] and can_alternate(parts)
            whole = (alternate(parts),) if gated else parts
            directory.matrices[name] = [_pack(kernels, pool, memory, name, part, gated) for part in whole]
        else:
            values = np.ascontiguousarray(stack_dequantized(parts), dtype=np.float32)
            offset = memory.take(values.nbytes, page=False)
            as_bytes(memory.address(offset), values.nbytes)[:] = values.view(np.uint8)
            directory.vectors[name] = PackedVector(values.size, offset)
        if isinstance(weights, LazyWeights):
            weights.release(name)
    memory.close()
    directory.total = memory.total
    return directory, memory


def _read_ahead(weights: Weights, names: list[str], threads: int) -> Iterator[tuple[str, tuple[Weight, ...]]]:
    """The parameters in order, ``threads`` of them being read while the caller has one."""
    with ThreadPoolExecutor(threads, thread_name_prefix="octavo-read") as readers:
        coming = deque(readers.submit(weights.__getitem__, name) for name in names[:threads])
        for index, name in enumerate(names):
            parts = coming.popleft().result()
            if index + threads < len(names):
                coming.append(readers.submit(weights.__getitem__, names[index + threads]))
            yield name, parts


def _check_shape(name: str, parts: list[tuple[int, ...]], wanted: tuple[int, ...]) -> None:
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    if shape != wanted or any(part[1:] != shape[1:] for part in parts):
        raise KernelError(f"weight {name} is {shape}, the program wants {wanted}")


def _fits(
    directory: Directory,
    wanted: Mapping[str, tuple[int, ...]],
    matrices: Collection[str],
    kernels: _kernels.Kernels,
) -> bool:
    """Whether ``directory`` holds these parameters, all inside its memory."""
    if directory.matrices.keys() != set(matrices) or directory.vectors.keys() != wanted.keys() - set(matrices):
        return False
    spans = [(vector.offset, vector.size * 4) for vector in directory.vectors.values()]
    for name, parts in directory.matrices.items():
        if wanted[name] != (sum(part.n for part in parts), parts[0].k) or len({part.k for part in parts}) != 1:
            return False
        if any(part.num_bytes != part.bytes_needed(kernels) for part in parts):
            return False
        spans += [(part.offset, part.num_bytes) for part in parts]
    return all((vector.size,) == wanted[name] for name, vector in directory.vectors.items()) and all(
        offset >= 0 and offset + size <= directory.total for offset, size in spans
    )


def _pack(
    kernels: _kernels.Kernels, pool: _kernels.ThreadPool, memory: Pieces, name: str, weight: Weight, gated: bool
) -> PackedMatrix:
    numbers = part_numbers(name, weight)
    shape = _kernels.PartShape(*numbers)
    num_bytes = kernels.packed_bytes(shape)
    part = PackedMatrix(*numbers, memory.take(num_bytes), num_bytes, gated)
    arrays = source_arrays(weight)
    addresses = (0 if array is None else array.ctypes.data for array in arrays)
    kernels.pack(pool, shape, memory.address(part.offset), *addresses)
    return part


_ARRAYS = ("data", "scale", "minimum", "scale_unit", "minimum_unit")  # of a Weight


def can_alternate(parts: tuple[Weight, ...]) -> bool:
    """Whether [gate | up] can become one part: both are of one kind."""
    kinds = {(p.shape, p.format, p.group_size, p.bits, p.zero) for p in parts}
    kinds_of_arrays = {tuple(None if (a := getattr(p, name)) is None else a.dtype for name in _ARRAYS) for p in parts}
    return len(parts) <= 2 and len(kinds) == len(kinds_of_arrays) == 1 and sum(p.shape[0] for p in parts) % 32 == 0


def alternate(parts: tuple[Weight, ...]) -> Weight:
    """[gate | up] that can alternate as one part: 16 rows of the one and 16 of the other in turn."""
    rows = sum(part.shape[0] for part in parts)

    def merge(arrays: list[npt.NDArray[np.generic] | None]) -> npt.NDArray[np.generic] | None:
        present = [array for array in arrays if array is not None]
        if not present:
            return None
        halves = np.concatenate(present).reshape(2, rows // 32, 16, -1)
        return halves.swapaxes(0, 1).reshape(rows, -1)

    merged = {name: merge([getattr(part, name) for part in parts]) for name in _ARRAYS}
    return replace(parts[0], shape=(rows, parts[0].shape[1]), **merged)  # type: ignore[arg-type]


def part_numbers(name: str, weight: Weight) -> tuple[int, int, int, int, bool, bool, int]:
    """The arguments of ``_kernels.PartShape``. Raises KernelError, with ``name``, where kernels lack the format."""
    n, k = weight.shape
    if weight.scale is None:
        return _FLOATS[weight.format], n, k, 0, False, False, 0
    group, middle = weight.group_size, 1 << (weight.bits - 1)
    if group < 16 or (group != 16 and group % 32) or k % group or (weight.scale_unit is not None and k % 256):
        raise KernelError(f"weight {name}: the CPU kernels have no groups of {group} along {k}")
    if weight.bits not in (4, 5, 6, 8) or weight.zero not in (0, middle) or (weight.bits == 8 and weight.zero):
        raise KernelError(f"weight {name}: the CPU kernels have no {weight.bits}-bit numbers around {weight.zero}")
    if weight.minimum is not None and weight.minimum.dtype != weight.scale.dtype:
        raise KernelError(f"weight {name}: scales and minima are of different types")
    centred = weight.bits == 8 or weight.zero == middle  # 8 bits are signed
    kind = _SCALE_KINDS[weight.scale.dtype.str[1:]]
    return weight.bits, n, k, group, centred, weight.minimum is not None, kind


def source_arrays(weight: Weight) -> list[npt.NDArray[np.generic] | None]:
    """The arrays that packing reads, contiguous, in the order of ``Kernels.pack``."""
    arrays = [getattr(weight, name) for name in _ARRAYS]
    return [None if array is None else np.ascontiguousarray(array) for array in arrays]
