"""Weight: one named tensor in one of four canonical formats, whatever file it came from.

Every stored value of every checkpoint format maps onto these without loss:

    float       data [N, K] float32, or bfloat16 kept as uint16
    int8_group  value[n, k] = scale[n, k // g] * (q[n, k] - zero) + minimum[n, k // g]      q int8
    int4_group  the same with q in 0..15, two per byte

K-quants keep scales and minima as small integers: counts of a float16 unit that 256 inputs share.

Schemes (``quantization/schemes/*.py``) make these from checkpoint tensors; backends read nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Format = Literal["float32", "bfloat16", "int8_group", "int4_group"]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter of shape ``shape`` ([K] vectors or [N, K] matrices, K fastest).

    ``data`` by format: float32 ``[*shape] float32``; bfloat16 ``[*shape] uint16``; int8_group ``[N, K] int8``;
    int4_group ``[N, K // 2] uint8``, byte j of a row holds element 2j in its low and 2j+1 in its high nibble.
    ``bits``: q needs no more; below 8, it lies in 0 .. 2^bits - 1. ``zero`` is the q that stands for ``minimum``.
    ``scale``/``minimum``: ``[N, K // group_size]`` float32 or float16 (exact); ``minimum`` None means zero. Or int8, to
    be multiplied by ``scale_unit``/``minimum_unit`` ``[N, K // 256]`` float16, which is exact in float32.
    ``source``: the checkpoint's own name of the type, for people (``"Q4_1"``, ``"BF16"``).
    """

    format: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.generic]
    scale: npt.NDArray[np.generic] | None = None
    minimum: npt.NDArray[np.generic] | None = None
    group_size: int = 0
    source: str = ""
    bits: int = 8
    zero: int = 0
    scale_unit: npt.NDArray[np.float16] | None = None
    minimum_unit: npt.NDArray[np.float16] | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.data, self.scale, self.minimum, self.scale_unit, self.minimum_unit)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes once packed, when a code takes no more than its ``bits``."""
        codes = self.data.size * self.bits // 8 if self.format == "int8_group" else self.data.nbytes
        return self.held_bytes - self.data.nbytes + codes

    def group_scale(self) -> npt.NDArray[np.float32]:
        """Scales ``[N, K // group_size]`` as numbers."""
        assert self.scale is not None
        return _numbers(self.scale, self.scale_unit)

    def group_minimum(self) -> npt.NDArray[np.float32] | None:
        """Minima ``[N, K // group_size]`` as numbers, None if all are zero."""
        return None if self.minimum is None else _numbers(self.minimum, self.minimum_unit)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The stored values as float32 ``[*shape]`` (exact up to float32 rounding of scale*(q-zero)+minimum)."""
        if self.format == "float32":
            return self.data.astype(np.float32, copy=False)
        if self.format == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        q = self.data
        if self.format == "int4_group":
            q = np.stack([self.data & 15, self.data >> 4], axis=-1).reshape(self.shape)  # type: ignore[operator]
        grouped = q.astype(np.float32).reshape(self.shape[0], -1, self.group_size) - np.float32(self.zero)
        out = grouped * self.group_scale()[..., None]
        minimum = self.group_minimum()
        if minimum is not None:
            out += minimum[..., None]
        return out.reshape(self.shape)


def _numbers(counts: npt.NDArray[np.generic], unit: npt.NDArray[np.float16] | None) -> npt.NDArray[np.float32]:
    """``counts`` [N, groups] as float32, times ``unit`` [N, groups of 256 inputs] if they have one."""
    numbers = counts.astype(np.float32)
    if unit is None:
        return numbers
    by_unit = numbers.reshape(*unit.shape, -1) * unit.astype(np.float32)[..., None]
    return by_unit.reshape(numbers.shape)


def outline(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros of that shape and type that take no memory: for a Weight of which only the sizes matter."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class Scheme(Protocol):
    """How a checkpoint with a ``quantization_config`` stores the weight of one module, in several tensors.

    A module ``X`` is quantised if there is a tensor ``X.<marker>``; what it is made of is ``X.<suffix>``, of which the
    last ones may be absent. Floats arrive as float32, the rest as stored.
    """

    @property
    def name(self) -> str:
        """For people: ``"AWQ"``."""
        ...

    @property
    def marker(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(N, K) of the weight, from the shapes of its tensors by suffix."""
        ...

    def outline(self, shape: tuple[int, ...]) -> Weight:
        """A Weight [N, K] as ``weight`` makes them, of :func:`outline` arrays. Scales are taken to fit float16."""
        ...

    def weight(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Weight:
        """The Weight of these tensors, of the very values. Raises FormatError or UnsupportedModel."""
        ...


# Parameters by the name the program uses. The parts of an entry are stacked along axis 0 (output features), so that
# a fused qkv may mix formats (K-quant files store V finer than Q and K). Vectors and norms have one float part.
Weights = Mapping[str, tuple[Weight, ...]]


class LazyWeights(Mapping[str, tuple[Weight, ...]]):
    """Weights that are read from their files when first asked for, and kept until ``release``.

    ``load(name)`` reads the parts of one parameter; ``tied``: parameter -> the one whose parts it shares.
    ``sources``: the files; ``identity()`` changes whenever anything changes that decides about the values, so that a
    backend may keep what it made of them; empty when a file is gone.
    """

    def __init__(
        self,
        load: Callable[[str], tuple[Weight, ...]],
        names: Collection[str],
        tied: Mapping[str, str],
        sources: tuple[str, ...],
        identity: Callable[[], str],
    ) -> None:
        self._load, self._names, self.tied = load, names, tied
        self.sources, self.identity = sources, identity
        self._read: dict[str, tuple[Weight, ...]] = {}

    def __getitem__(self, name: str) -> tuple[Weight, ...]:
        if name not in self._names:
            raise KeyError(name)
        owner = self.tied.get(name, name)
        if owner not in self._read:
            self._read[owner] = self._load(owner)
        return self._read[owner]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def release(self, name: str) -> None:
        """Let go of a parameter's parts; asked for again, they are read again."""
        self._read.pop(self.tied.get(name, name), None)


def owners(weights: Weights) -> dict[str, str]:
    """Parameter -> the parameter that stands for it and all that share its parts. Reads nothing."""
    if isinstance(weights, LazyWeights):
        return {name: weights.tied.get(name, name) for name in weights}
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parts), name) for name, parts in weights.items()}


def stack_dequantized(parts: tuple[Weight, ...]) -> npt.NDArray[np.float32]:
    """All parts of one parameter as one float32 array."""
    return np.concatenate([part.dequantize() for part in parts], axis=0)
