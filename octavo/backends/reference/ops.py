"""The ops in NumPy, one plain function each: what every other backend is compared with.

Arrays are float32 or float64; results have the type of ``x``. Everything is computed row by row (a matrix-vector
product per row, one row's attention at a time), so a row's bits depend on nothing but that row and, in attention, on
its own past. Knows no programs and no weight formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

_erf = np.vectorize(math.erf, otypes=[np.float64])
Array = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int32]


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [M, K], weight [N, K], bias [N] -> [M, N]."""
    out = np.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    for row in range(x.shape[0]):
        out[row] = weight @ x[row]
    return out if bias is None else out + bias


def rms_norm(x: Array, weight: Array, eps: float, groups: int = 1) -> Array:
    """x [M, H], weight [H / groups] -> [M, H]."""
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups)  # -1 would not do for no rows
    mean = np.mean(parts * parts, axis=-1, keepdims=True)
    return (parts / np.sqrt(mean + x.dtype.type(eps)) * weight).reshape(x.shape)


def layer_norm(x: Array, weight: Array, bias: Array | None = None, *, eps: float) -> Array:
    """x [M, H], weight [H], bias [H] -> [M, H]."""
    apart = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(apart * apart, axis=-1, keepdims=True)
    out: Array = apart / np.sqrt(variance + x.dtype.type(eps)) * weight
    return out if bias is None else out + bias


def fused_linear(
    x: Array,
    residual: Array | None = None,
    *,
    weight: Array,
    bias: Array | None = None,
    norm: Array | None = None,
    eps: float,
    gate: str,
) -> Array:
    """What its parts compute one after the other."""
    out = linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    if gate:
        out = {"silu_mul": silu_mul, "gelu_mul": gelu_mul}[gate](out)
    return out if residual is None else residual + out


def rows(x: Array, logit_rows: Ints) -> Array:
    """The chosen rows of x [T, H]."""
    return x[logit_rows]


def add(a: Array, b: Array) -> Array:
    """Of equal shapes."""
    return a + b


def split(x: Array, widths: Sequence[int]) -> list[Array]:
    """Column ranges of x [M, sum(widths)]."""
    return np.split(x, np.cumsum(widths)[:-1], axis=1)


def rope(x: Array, positions: Ints, head_dim: int, inv_freq: Sequence[float], attention_factor: float = 1.0) -> Array:
    """x [M, heads * head_dim] rotated by its rows' positions [M]; half-split layout."""
    pairs = len(inv_freq)
    angle = positions.astype(x.dtype)[:, None] * np.asarray(inv_freq, dtype=np.float32).astype(x.dtype)
    cos = (np.cos(angle) * x.dtype.type(attention_factor))[:, None, :]
    sin = (np.sin(angle) * x.dtype.type(attention_factor))[:, None, :]
    heads = x.reshape(x.shape[0], -1, head_dim)
    low, high, rest = np.split(heads, [pairs, 2 * pairs], axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1).reshape(x.shape)


def silu_mul(x: Array) -> Array:
    """x = [gate | up] [M, 2I] -> silu(gate) * up [M, I]."""
    gate, up = np.split(x, 2, axis=1)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, zero
        return gate / (1 + np.exp(-gate)) * up


def gelu_mul(x: Array) -> Array:
    """x = [gate | up] [M, 2I] -> gelu(gate) * up [M, I]."""
    gate, up = np.split(x, 2, axis=1)
    return gelu(gate, tanh=True) * up


def gelu(x: Array, tanh: bool) -> Array:
    """x [M, H] -> [M, H], exact or approximated with tanh."""
    if tanh:
        z = x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x**3)
        return x / 2 * (1 + np.tanh(z))
    return x / 2 * (1 + _erf(x / np.sqrt(2)).astype(x.dtype))


def soft_cap(x: Array, cap: float) -> Array:
    """x [M, H] -> [M, H], within +-cap."""
    limit = x.dtype.type(cap)
    out: Array = limit * np.tanh(x / limit)
    return out


def write_kv(cache: Array, rows: Array, slots: Ints) -> None:
    """rows [M, Hkv * D] into cache [num_blocks, block_size, Hkv, D] at slots [M], in place."""
    _, block_size, kv_heads, head_dim = cache.shape
    cache[slots // block_size, slots % block_size] = rows.reshape(-1, kv_heads, head_dim)


def round_to_bf16(rows: Array, head_dim: int) -> Array:
    """The nearest bfloat16 of every number, ties to even, in the type of ``rows``."""
    bits = rows.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(rows), rounded.view(np.float32), rows).astype(rows.dtype)


def round_to_int8(rows: Array, head_dim: int) -> Array:
    """What int8 with a scale per row and head leaves of rows [M, Hkv * D]: ``scale * q``.

    scale = max|x| / 127 and q = x / scale to the nearest integer, ties to even, both computed in float32. A head with
    a number that is not finite becomes NaN.
    """
    heads = rows.astype(np.float32).reshape(rows.shape[0], -1, head_dim)
    scale = np.abs(heads).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):
        quantised = np.clip(np.rint(heads / np.where(scale > 0, scale, np.float32(1))), -127, 127)
        scale = scale + (scale - scale)
        return (quantised.astype(rows.dtype) * scale.astype(rows.dtype)).reshape(rows.shape)


def nearest_fp8(x: Array, mantissa_bits: int, bias: int, most: float) -> Array:
    """The nearest number of an 8-bit floating point format, ties to even, saturating at +-most. float64.

    OCP 8-bit Floating Point Specification (OFP8), revision 1.0: normal numbers are 2^e * (1 + m / 2^mantissa_bits) with
    e from 1 - bias; below, multiples of 2^(1 - bias - mantissa_bits).
    """
    exact = np.asarray(x, np.float64)
    exponent = np.maximum(np.frexp(exact)[1] - 1, 1 - bias)
    unit = np.ldexp(1.0, exponent - mantissa_bits)
    return np.clip(np.rint(exact / unit) * unit, -most, most)


def round_to_fp8(rows: Array, head_dim: int, mantissa_bits: int, bias: int, most: float) -> Array:
    """What fp8 with a scale per row and head leaves of rows [M, Hkv * D]: ``scale * nearest_fp8(x / scale)``.

    scale = max|x| / most and x / scale in float32. A head with a number that is not finite becomes NaN.
    """
    heads = rows.astype(np.float32).reshape(rows.shape[0], -1, head_dim)
    scale = np.abs(heads).max(axis=-1, keepdims=True) / np.float32(most)
    with np.errstate(invalid="ignore"):
        numbers = nearest_fp8(heads / np.where(scale > 0, scale, np.float32(1)), mantissa_bits, bias, most)
        scale = scale + (scale - scale)
        return (numbers.astype(rows.dtype) * scale.astype(rows.dtype)).reshape(rows.shape)


KV_ROUNDING: dict[str, Callable[[Array, int], Array]] = {
    "auto": lambda rows, head_dim: rows,
    "bfloat16": round_to_bf16,
    "int8": round_to_int8,
    "fp8_e4m3": partial(round_to_fp8, mantissa_bits=3, bias=7, most=448.0),
    "fp8_e5m2": partial(round_to_fp8, mantissa_bits=2, bias=15, most=57344.0),
}


def paged_attention(
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Ints,
    seq_of_row: Ints,
    positions: Ints,
    scale: float,
    window: int | None = None,
) -> Array:
    """Causal attention of q [M, H * K] over paged caches [num_blocks, block_size, Hkv, K or V] -> [M, H * V].

    Row m belongs to sequence ``seq_of_row[m]`` (a row of block_tables) and sees its positions 0..positions[m], or the
    last ``window`` of these.
    """
    _, block_size, kv_heads, key_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    num_heads = q.shape[1] // key_dim
    out = np.empty((q.shape[0], num_heads * value_dim), q.dtype)
    for row in range(q.shape[0]):
        end = int(positions[row]) + 1
        first = 0 if window is None else max(0, end - window)
        first_block = first // block_size
        blocks = block_tables[seq_of_row[row], first_block : -(-end // block_size)]
        seen = slice(first - first_block * block_size, end - first_block * block_size)
        keys = key_cache[blocks].reshape(-1, kv_heads, key_dim)[seen]
        values = value_cache[blocks].reshape(-1, kv_heads, value_dim)[seen]
        heads = q[row].reshape(kv_heads, -1, key_dim)
        result = np.empty((*heads.shape[:2], value_dim), q.dtype)
        for h in range(kv_heads):
            scores = heads[h] @ keys[:, h].T * q.dtype.type(scale)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            result[h] = weights / weights.sum(axis=-1, keepdims=True) @ values[:, h]
        out[row] = result.reshape(-1)
    return out
