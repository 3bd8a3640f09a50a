"""What AWQ, GPTQ and compressed-tensors share: small integers in int32 words, and scales with zero points.

value[n, k] = scale[n, k // g] * (code[n, k] - zero[n, k // g]). Knows no files and no names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.exceptions import FormatError, UnsupportedModel
from octavo.quantization.base import Weight, outline

Codes = npt.NDArray[np.uint8]


def setting(config: Mapping[str, Any], names: Sequence[str], kind: type, default: Any = None) -> Any:
    """The first of ``names`` that the section has. Raises UnsupportedModel if it is absent or of another type."""
    for name in names:
        if (value := config.get(name)) is not None:
            if type(value) is not kind:
                raise UnsupportedModel(f"{name} = {value!r}: must be a {kind.__name__}")
            return value
    if default is None:
        raise UnsupportedModel(f"{names[0]} is missing")
    return default


def check_bits(bits: int, known: Sequence[int]) -> None:
    """Raises UnsupportedModel for widths that octavo lacks."""
    if bits not in known:
        raise UnsupportedModel(f"{bits} bits: must be {' or '.join(map(str, known))}")


def check_group(group: int, k: int) -> None:
    """Raises UnsupportedModel unless groups of ``group`` inputs divide ``k`` and are ones that kernels have."""
    if group % 32 or group <= 0 or k % group:
        raise UnsupportedModel(f"groups of {group} along {k} inputs: must be a multiple of 32 that divides them")


def unpack(words: npt.NDArray[Any], bits: int, order: Sequence[int] | None = None) -> Codes:
    """int32 ``[R, C]`` -> codes ``[R, C * 32 / bits]``: those of a word, the lowest bits first.

    ``order[i]``: which of its word's numbers the i-th lowest bits hold; in order by default.
    """
    per_word = 32 // bits
    fields = np.ascontiguousarray(words).view("<u4")[..., None] >> (np.arange(per_word, dtype=np.uint32) * bits)
    codes = (fields & ((1 << bits) - 1)).astype(np.uint8)
    if order is not None:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(words.shape[0], -1)


def shape_error(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> FormatError:
    return FormatError("tensor", f"{what} is {list(found)}, must be {list(wanted)}")


def weight(codes: Codes, scale: npt.NDArray[np.float32], zero: npt.NDArray[Any], bits: int, source: str) -> Weight:
    """``codes`` [N, K] of 4 or 8 bits with ``scale`` and ``zero`` [N, groups], as a Weight of the same values.

    One zero point in the middle needs no minima; others become minima ``-zero * scale``, exact in float32.
    """
    n, k = codes.shape
    middle = 1 << (bits - 1)
    scale = np.ascontiguousarray(scale, np.float32)
    symmetric = bool((zero == middle).all())
    # 8-bit codes are kept signed, so that their middle is 0
    offset = 0 if bits == 4 else middle
    minimum = None if symmetric else np.ascontiguousarray((offset - zero.astype(np.float32)) * scale)
    narrow = _narrow(scale) if minimum is None else scale  # kernels want both of one type, and minima need the bits
    if bits == 4:
        data: npt.NDArray[Any] = codes[:, 0::2] | (codes[:, 1::2] << 4)
    else:
        data = (codes ^ 0x80).view(np.int8)
    return Weight(
        format="int4_group" if bits == 4 else "int8_group",
        shape=(n, k),
        data=data,
        scale=narrow,
        minimum=minimum,
        group_size=k // scale.shape[1],
        source=source,
        bits=bits,
        zero=middle if symmetric and bits == 4 else 0,
    )


def _narrow(scale: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """``scale`` as float16 if that is exact."""
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), scale) else scale


def outline_of(shape: tuple[int, ...], bits: int, group: int, symmetric: bool, source: str) -> Weight:
    """What ``weight`` makes of codes [N, K] in groups of ``group`` inputs, -1 for all, without their numbers.

    Asymmetric ones have a zero point that is not in the middle, symmetric ones scales that float16 can hold.
    """
    n, k = shape
    group = k if group == -1 else group
    check_group(group, k)
    scales = outline((n, k // group), np.float16 if symmetric else np.float32)
    return Weight(
        format="int4_group" if bits == 4 else "int8_group",
        shape=(n, k),
        data=outline((n, k // 2), np.uint8) if bits == 4 else outline((n, k), np.int8),
        scale=scales,
        minimum=None if symmetric else scales,
        group_size=group,
        source=source,
        bits=bits,
        zero=1 << (bits - 1) if symmetric and bits == 4 else 0,
    )
