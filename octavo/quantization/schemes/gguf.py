"""GGUF block types -> Weight, without loss; vectorised bit shuffling only.

Layouts as in ggml's ``block_q*`` structures. In each, a block of B numbers is one fixed-size record, and a row of K
numbers is K / B records. Where ggml computes ``scale * q``, so does ``Weight.dequantize``, in the same order, hence
dequantised values are equal to ggml's. Knows no files and no names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.config import Dtype
from octavo.exceptions import FormatError, UnsupportedModel
from octavo.quantization.base import Weight, outline
from octavo.quantization.schemes import unquantized

U8 = npt.NDArray[np.uint8]
Bytes = npt.NDArray[Any]


class Parts(NamedTuple):
    """What a converter returns: the arrays of a Weight, flat."""

    data: Bytes
    scale: Bytes
    minimum: Bytes | None = None
    scale_unit: Bytes | None = None
    minimum_unit: Bytes | None = None


def _record(*fields: tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype([(name, kind) if count == 1 else (name, kind, (count,)) for name, kind, count in fields])


_HEAD_K = (("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12))
_BLOCKS: dict[str, tuple[int, np.dtype[Any]]] = {
    "Q4_0": (32, _record(("d", "<f2", 1), ("qs", "u1", 16))),
    "Q4_1": (32, _record(("d", "<f2", 1), ("m", "<f2", 1), ("qs", "u1", 16))),
    "Q5_0": (32, _record(("d", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16))),
    "Q5_1": (32, _record(("d", "<f2", 1), ("m", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16))),
    "Q8_0": (32, _record(("d", "<f2", 1), ("qs", "i1", 32))),
    "Q4_K": (256, _record(*_HEAD_K, ("qs", "u1", 128))),
    "Q5_K": (256, _record(*_HEAD_K, ("qh", "u1", 32), ("qs", "u1", 128))),
    "Q6_K": (256, _record(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2", 1))),
}
_PIECE = 2048  # blocks converted at a time
_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def from_blocks(raw: U8, type: str, shape: tuple[int, ...], dtype: Dtype = "auto") -> Weight:
    """A Weight from a GGUF tensor's raw bytes (C order, rows of K = shape[-1] numbers).

    ``dtype`` matters to float types only. Raises UnsupportedModel for types octavo lacks and for quantised vectors,
    FormatError when sizes do not agree.
    """
    check_type(type, shape)
    if type in _FLOATS:
        return unquantized.from_array(raw.reshape(-1).view(_FLOATS[type]).reshape(shape), type, dtype)
    block, record = _BLOCKS[type]
    rows, k = shape
    if k % block or raw.size != rows * k // block * record.itemsize:
        raise FormatError("tensor", f"{raw.size} bytes are not a {type} matrix of {rows} x {k}")
    parts = _in_pieces(_CONVERT[type], raw.reshape(-1).view(record))
    bits, zero = _CODES[type]
    return Weight(
        format="int4_group" if bits == 4 else "int8_group",
        shape=shape,
        data=parts.data.reshape(rows, -1),
        scale=parts.scale.reshape(rows, -1),
        minimum=_by_row(parts.minimum, rows),
        group_size=k * rows // parts.scale.size,
        source=type,
        bits=bits,
        zero=zero,
        scale_unit=_by_row(parts.scale_unit, rows),
        minimum_unit=_by_row(parts.minimum_unit, rows),
    )


def check_type(type: str, shape: tuple[int, ...]) -> None:
    """Raises UnsupportedModel for types octavo lacks and for quantised vectors."""
    if type not in _FLOATS and type not in _BLOCKS:
        raise UnsupportedModel(f"GGUF type {type}: must be one of {', '.join([*_FLOATS, *_BLOCKS])}")
    if type in _BLOCKS and len(shape) != 2:
        raise UnsupportedModel(f"GGUF type {type} for a tensor of shape {shape}: only matrices are quantised")


def _by_row(flat: Bytes | None, rows: int) -> Bytes | None:
    return None if flat is None else flat.reshape(rows, -1)


def outline_of(type: str, shape: tuple[int, ...], dtype: Dtype = "auto") -> Weight:
    """What ``from_blocks`` makes of a tensor of this type and shape, without its numbers. Raises as that."""
    check_type(type, shape)
    if type in _FLOATS:
        return unquantized.outline_of(shape, type, dtype)
    one, (rows, k) = _one_block(type), shape
    block = one.shape[1]

    def widen(array: Bytes | None) -> Bytes | None:
        return None if array is None else outline((rows, array.size * k // block), array.dtype)

    arrays = {name: widen(getattr(one, name)) for name in Parts._fields}
    return replace(one, shape=shape, **arrays)  # type: ignore[arg-type]


@cache
def _one_block(type: str) -> Weight:
    block, record = _BLOCKS[type]
    return from_blocks(np.zeros(record.itemsize, np.uint8), type, (1, block))


def _in_pieces(convert: Callable[[Bytes], Parts], blocks: Bytes) -> Parts:
    """``convert(blocks)``, a piece at a time, so that its temporaries stay in the cache."""
    pieces = [convert(blocks[start : start + _PIECE]) for start in range(0, len(blocks), _PIECE)]

    def join(field: int) -> Bytes | None:
        parts = [part for piece in pieces if (part := piece[field]) is not None]
        return np.concatenate([part.reshape(-1) for part in parts]) if parts else None

    data, scale = join(0), join(1)
    assert data is not None
    assert scale is not None
    return Parts(data, scale, join(2), join(3), join(4))


def _pairs(halves: Bytes) -> U8:
    """Nibbles in order, two per byte: from ``halves`` [..., n], whose byte j holds elements j (low) and n + j (high).

    The result is [..., 2, n / 2]. Works on two bytes at a time: of uint16 ``b1 << 8 | b0``, the low nibbles become
    one byte and the high ones another.
    """
    words = np.ascontiguousarray(halves).view("<u2")
    out = np.empty((*words.shape[:-1], 2, words.shape[-1]), dtype=np.uint8)
    shifted = words >> 4
    out[..., 0, :] = (words & 0x000F) | (shifted & 0x00F0)
    out[..., 1, :] = (shifted & 0x000F) | ((words >> 8) & 0x00F0)
    return out


def _nibbles(halves: Bytes) -> Bytes:
    """The same elements [..., 2, n], one per byte."""
    return np.stack([halves & 15, halves >> 4], axis=-2)


def _q4_0(b: Bytes) -> Parts:
    return Parts(_pairs(b["qs"]), b["d"])


def _q4_1(b: Bytes) -> Parts:
    return Parts(_pairs(b["qs"]), b["d"], b["m"])


def _five_bits(b: Bytes) -> Bytes:
    high = np.unpackbits(b["qh"], axis=1, bitorder="little").reshape(-1, 2, 16)
    return (_nibbles(b["qs"]) | (high << 4)).view(np.int8)


def _q5_0(b: Bytes) -> Parts:
    return Parts(_five_bits(b), b["d"])


def _q5_1(b: Bytes) -> Parts:
    return Parts(_five_bits(b), b["d"], b["m"])


def _q8_0(b: Bytes) -> Parts:
    return Parts(b["qs"], b["d"])


def _parts_k(b: Bytes, data: Bytes) -> Parts:
    """``data`` with scales ``d * sc`` and minima ``-dmin * m``; sc and m [blocks, 8] are 6-bit pairs in 12 bytes.

    Bytes 0-3 and 4-7 hold the low six bits of sc and m of groups 0-3, and, in their top two bits, the top of groups
    4-7, whose low four bits are the nibbles of bytes 8-11.
    """
    first, second, third = b["scales"][:, :4], b["scales"][:, 4:8], b["scales"][:, 8:]
    sc = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    m = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return Parts(data, sc.view(np.int8), m.view(np.int8), b["d"], -b["dmin"])


def _q4_k(b: Bytes) -> Parts:
    return _parts_k(b, _pairs(b["qs"].reshape(-1, 4, 32)))


def _q5_k(b: Bytes) -> Parts:
    groups = np.arange(8, dtype=np.uint8)[:, None]
    high = (b["qh"][:, None, :] >> groups) & 1  # bit g of byte j belongs to element j of group g
    low = _nibbles(b["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _parts_k(b, (low | (high << 4)).view(np.int8))


def _q6_k(b: Bytes) -> Parts:
    low = _nibbles(b["ql"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)  # [block, half, quarter, element]
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (b["qh"].reshape(-1, 2, 1, 32) >> shifts) & 3
    return Parts((low | (high << 4)).view(np.int8), b["scales"], scale_unit=b["d"])


_CONVERT: dict[str, Callable[[Bytes], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_CODES = {  # bits, and which number is zero
    "Q4_0": (4, 8),
    "Q4_1": (4, 0),
    "Q5_0": (5, 16),
    "Q5_1": (5, 0),
    "Q8_0": (8, 0),
    "Q4_K": (4, 0),
    "Q5_K": (5, 0),
    "Q6_K": (6, 32),
}
