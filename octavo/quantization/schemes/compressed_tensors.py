"""compressed-tensors with integer weights: int8 per channel (W8A8), and packed 4- or 8-bit groups (W4A16, W8A16).

int-quantized: ``weight`` int8 [N, K], ``weight_scale`` [N, 1]. pack-quantized: ``weight_packed`` int32
[N, K * bits / 32], neighbouring inputs in a word, lowest bits first, codes being q + 2^(bits - 1); ``weight_scale``
[N, groups]. What the config says of activations is not followed: octavo's are finer (int16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.exceptions import UnsupportedModel
from octavo.quantization.base import Scheme, Weight
from octavo.quantization.schemes.packed_ints import (
    check_bits,
    check_group,
    outline_of,
    setting,
    shape_error,
    unpack,
    weight,
)


class IntQuantized:
    """See ``Scheme``: int8 numbers, a scale per output."""

    name = "INT8"
    marker = "weight_scale"
    suffixes = ("weight", "weight_scale", "input_scale", "input_zero_point")

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        return shapes["weight"]

    def outline(self, shape: tuple[int, ...]) -> Weight:
        return outline_of(shape, 8, -1, symmetric=True, source=self.name)

    def weight(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Weight:
        data, scale = tensors["weight"], tensors["weight_scale"]
        if data.dtype != np.int8:
            raise UnsupportedModel(f"weights of type {data.dtype}: must be int8")
        n, k = data.shape
        check_group(k, k)
        if scale.size not in (1, n):
            raise shape_error("weight_scale", scale.shape, (n, 1))
        codes = data.view(np.uint8) ^ np.uint8(0x80)
        per_channel = np.broadcast_to(scale.reshape(-1, 1), (n, 1))
        return weight(codes, per_channel, np.full((n, 1), 128), 8, self.name)


class PackQuantized:
    """See ``Scheme``: packed symmetric numbers in groups of ``group``, as the config says, or -1 for whole rows."""

    marker = "weight_packed"
    suffixes = ("weight_packed", "weight_scale", "weight_shape")

    def __init__(self, bits: int, group: int) -> None:
        self._bits, self._group = bits, group
        self.name = f"INT{bits}"

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        n, words = shapes["weight_packed"]
        return n, words * 32 // self._bits

    def outline(self, shape: tuple[int, ...]) -> Weight:
        return outline_of(shape, self._bits, self._group, symmetric=True, source=self.name)

    def weight(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Weight:
        codes, scale = unpack(tensors["weight_packed"], self._bits), tensors["weight_scale"]
        n, k = codes.shape
        stored = tensors.get("weight_shape")
        if stored is not None and stored.tolist() != [n, k]:
            raise shape_error("weight_shape", tuple(stored.tolist()), (n, k))
        if scale.ndim != 2 or scale.shape[0] != n or k % scale.shape[1]:
            raise shape_error("weight_scale", scale.shape, (n, 1))
        check_group(k // scale.shape[1], k)
        zeros = np.full(scale.shape, 1 << (self._bits - 1))
        return weight(codes, scale, zeros, self._bits, self.name)


def make(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a config section. Raises UnsupportedModel for layouts that octavo lacks, naming the setting."""
    groups = setting(config, ("config_groups",), dict)
    layout = setting(config, ("format",), str)
    sections = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    arguments = [section for section in sections if isinstance(section, dict)]
    if not arguments or len(arguments) < len(sections):
        raise UnsupportedModel("config_groups: each must say how weights are stored")
    bits = {one.get("num_bits") for one in arguments}
    if len(bits) != 1:
        raise UnsupportedModel(f"config_groups of different num_bits {sorted(map(str, bits))}")
    for one in arguments:
        if one.get("type", "int") != "int" or one.get("symmetric") is False or one.get("actorder") is not None:
            raise UnsupportedModel(f"weights = {one!r}: must be symmetric integers in the order of the inputs")
    width: Any = bits.pop()
    if layout == "int-quantized":
        check_bits(width, (8,))
        return IntQuantized()
    if layout == "pack-quantized":
        check_bits(width, (4, 8))
        sizes = [size for one in arguments if isinstance(size := one.get("group_size"), int) and size > 0]
        return PackQuantized(width, min(sizes, default=-1))  # of whole rows without
    raise UnsupportedModel(f"format {layout!r}: must be int-quantized or pack-quantized")
