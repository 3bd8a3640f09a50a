"""Random weights in every packed format, and the arithmetic of the linear kernels written out in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.backends.cpu import _kernels
from octavo.backends.cpu.weights import part_numbers, source_arrays
from octavo.quantization.base import Weight

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of weights. ``name`` is the test id; ``scales`` the type of scales and minima, int8 for counted ones."""

    name: str
    format: str
    group: int = 0
    minimum: bool = False
    scales: str = "float32"
    bits: int = 8
    zero: int = 0

    def fits(self, k: int) -> bool:
        return k % (256 if self.scales == "int8" else max(self.group, 1)) == 0

    def make(self, rng: np.random.Generator, n: int, k: int) -> Weight:
        """Random weights [n, k] of about unit size; every code occurs."""
        if self.format == "float32":
            return Weight("float32", (n, k), rng.standard_normal((n, k), dtype=np.float32))
        if self.format == "bfloat16":
            return Weight("bfloat16", (n, k), to_bf16(rng.standard_normal((n, k), dtype=np.float32)))
        if self.bits == 4:
            data: Any = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        elif self.bits == 8:
            data = rng.integers(-128, 128, (n, k), dtype=np.int8)
        else:
            data = rng.integers(0, 1 << self.bits, (n, k), dtype=np.int8)
        scale, minimum = rng.uniform(0.01, 0.1, (n, k // self.group)), rng.uniform(-0.5, 0.5, (n, k // self.group))
        units: list[Any] = [None, None]
        if self.scales == "int8":
            scale, minimum = (rng.integers(-128, 128, scale.shape) for _ in range(2))
            units = [rng.uniform(1e-4, 1e-2, (n, k // 256)).astype(np.float16) for _ in range(2)]
        return Weight(
            self.format,  # type: ignore[arg-type]
            (n, k),
            data,
            scale.astype(self.scales),
            minimum.astype(self.scales) if self.minimum else None,
            self.group,
            bits=self.bits,
            zero=self.zero,
            scale_unit=units[0],
            minimum_unit=units[1] if self.minimum else None,
        )


FLOAT_CASES = [Case("f32", "float32"), Case("bf16", "bfloat16")]
GROUP_CASES = [
    Case("i8g32-half", "int8_group", 32, scales="float16"),  # Q8_0
    Case("i8g32-min", "int8_group", 32, minimum=True),
    Case("i8g16", "int8_group", 16),
    Case("i8g16-min-half", "int8_group", 16, minimum=True, scales="float16"),
    Case("i4g32-half-centred", "int4_group", 32, scales="float16", bits=4, zero=8),  # Q4_0
    Case("i4g32-min-half", "int4_group", 32, minimum=True, scales="float16", bits=4),  # Q4_1
    Case("i4g32-min-counted", "int4_group", 32, minimum=True, scales="int8", bits=4),  # Q4_K
    Case("i4g32-counted", "int4_group", 32, scales="int8", bits=4),
    Case("i4g64-min", "int4_group", 64, minimum=True, bits=4),
    Case("i4g16-min", "int4_group", 16, minimum=True, bits=4),
    Case("i5g32-half-centred", "int8_group", 32, scales="float16", bits=5, zero=16),  # Q5_0
    Case("i5g32-min-half", "int8_group", 32, minimum=True, scales="float16", bits=5),  # Q5_1
    Case("i5g32-min-counted", "int8_group", 32, minimum=True, scales="int8", bits=5),  # Q5_K
    Case("i5g16", "int8_group", 16, bits=5),
    Case("i6g16-counted-centred", "int8_group", 16, scales="int8", bits=6, zero=32),  # Q6_K
    Case("i6g64-min-half", "int8_group", 64, minimum=True, scales="float16", bits=6),
]
CASES = FLOAT_CASES + GROUP_CASES


def probe(isa: str, *weights: Weight, threads: int = 1) -> Any:
    """The weights as the parts of one packed linear."""
    packed = _kernels.LinearProbe(isa, threads)
    for weight in weights:
        arrays = source_arrays(weight)
        shape = _kernels.PartShape(*part_numbers("", weight))
        packed.add_part(shape, *(0 if array is None else array.ctypes.data for array in arrays))
    return packed


def to_bf16(x: FloatArray) -> npt.NDArray[np.uint16]:
    """Nearest bfloat16, ties to even, for finite numbers."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def round_to_bf16(x: FloatArray) -> FloatArray:
    """x as float32 after a round trip through bfloat16."""
    return (to_bf16(x).astype(np.uint32) << 16).view(np.float32)


def quantize_activations(x: FloatArray) -> tuple[npt.NDArray[np.int32], FloatArray]:
    """Codes [M, groups, 32] and scales [M]: a row shares max|x| / 32767. Missing inputs are zero."""
    groups = -(-x.shape[1] // 32)
    padded = np.zeros((x.shape[0], groups * 32), np.float32)
    padded[:, : x.shape[1]] = x
    greatest = np.abs(x).max(axis=1)
    sane = greatest >= np.float32(1e-33)  # below, the codes are zero
    inverse = np.where(sane, np.float32(32767) / np.where(sane, greatest, np.float32(1)), np.float32(0))
    codes = np.rint(padded * inverse[:, None]).astype(np.int32)
    return codes.reshape(len(x), groups, 32), greatest / np.float32(32767)


def group_linear(weight: Weight, x: FloatArray) -> FloatArray:
    """x W^T as the grouped kernels compute it: exact integer dots, then per subgroup of K, in order,
    acc += minimum * sum of codes; acc += float(dot) * weight scale; at last acc * activation scale."""
    n, k = weight.shape
    span = 16 if weight.group_size == 16 else 32
    data = weight.data
    if weight.format == "int4_group":
        data = np.stack([data & 15, data >> 4], axis=-1)  # type: ignore[operator]
    codes = data.reshape(n, k // span, span).astype(np.int64) - weight.zero
    repeat = weight.group_size // span
    scale, minimum = np.repeat(weight.group_scale(), repeat, axis=1), weight.group_minimum()
    minimum = None if minimum is None else np.repeat(minimum, repeat, axis=1)
    x_codes, x_scale = quantize_activations(x)
    x_codes = x_codes.reshape(len(x), -1, span)[:, : k // span]
    y = np.zeros((len(x), n), np.float32)
    for g in range(k // span):  # products are exact in float64, so that each line rounds as a fused multiply-add
        if minimum is not None:
            total = x_codes[:, g].sum(axis=1).astype(np.float64)
            y = (minimum[:, g].astype(np.float64) * total[:, None] + y).astype(np.float32)
        dot = (x_codes[:, g].astype(np.int64) @ codes[:, g].T).astype(np.float32)
        y = (dot.astype(np.float64) * scale[:, g].astype(np.float64) + y).astype(np.float32)
    return y * x_scale[:, None]
