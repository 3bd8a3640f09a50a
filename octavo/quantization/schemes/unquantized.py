"""Plain float tensors -> Weight, in the computation type the user asked for. Knows no file formats."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.config import Dtype
from octavo.exceptions import UnsupportedModel
from octavo.quantization.base import Weight, outline


def to_float32(data: npt.NDArray[Any], source: str) -> npt.NDArray[np.float32]:
    """Values of an F32, F16 or BF16 (as uint16) array, exactly."""
    if source == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32, copy=False)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 -> bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_array(data: npt.NDArray[Any], source: str, dtype: Dtype) -> Weight:
    """A Weight from an F32, F16 or BF16 (as uint16) array.

    Vectors (norms, biases) become float32. Matrices become ``dtype``; "auto" is bfloat16 for the 16-bit types and
    float32 for F32. Raises UnsupportedModel for other types.
    """
    check_type(source)
    if data.ndim == 1 or _matrix_format(source, dtype) == "float32":
        return Weight("float32", data.shape, to_float32(data, source), source=source)
    bits = data if source == "BF16" else to_bfloat16(to_float32(data, source))
    return Weight("bfloat16", data.shape, bits, source=source)


def plus(weight: Weight, number: float) -> Weight:
    """``weight + number``, a float32 vector as ``weight`` is."""
    values = weight.dequantize() + np.float32(number)
    return Weight("float32", weight.shape, values, source=weight.source)


def check_type(source: str) -> None:
    """Raises UnsupportedModel for types octavo lacks."""
    if source not in ("F32", "F16", "BF16"):
        raise UnsupportedModel(f"tensor type {source}: must be F32, F16 or BF16")


def outline_of(shape: tuple[int, ...], source: str, dtype: Dtype) -> Weight:
    """What ``from_array`` makes of an array of this shape and type, without its numbers. Raises UnsupportedModel."""
    check_type(source)
    if len(shape) == 1 or _matrix_format(source, dtype) == "float32":
        return Weight("float32", shape, outline(shape, np.float32), source=source)
    return Weight("bfloat16", shape, outline(shape, np.uint16), source=source)


def _matrix_format(source: str, dtype: Dtype) -> Literal["bfloat16", "float32"]:
    if dtype == "auto":
        return "float32" if source == "F32" else "bfloat16"
    return dtype
