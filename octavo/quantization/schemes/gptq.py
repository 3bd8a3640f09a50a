"""GPTQ (Frantar et al., ICLR 2023) as AutoGPTQ and GPTQModel store it: 4 or 8 bits, groups along the inputs.

``qweight`` int32 [K * bits / 32, N]: a word holds neighbouring inputs, lowest bits first. ``qzeros`` int32
[K / g, N * bits / 32]: neighbouring outputs, one less than the zero point in the old format (``checkpoint_format``
"gptq"), the zero point itself in "gptq_v2". ``scales`` [K / g, N]. ``g_idx`` int32 [K]: the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.exceptions import UnsupportedModel
from octavo.quantization.base import Weight
from octavo.quantization.schemes.packed_ints import (
    check_bits,
    check_group,
    outline_of,
    setting,
    shape_error,
    unpack,
    weight,
)


class GPTQ:
    """See ``Scheme``. Raises UnsupportedModel for other widths than 4 and 8 bits."""

    name = "GPTQ"
    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = setting(config, ("bits",), int)
        check_bits(self._bits, (4, 8))
        self._group = setting(config, ("group_size",), int)
        self._symmetric = setting(config, ("sym",), bool, True)
        layout = setting(config, ("checkpoint_format",), str, "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(f"checkpoint_format {layout!r}: must be gptq or gptq_v2")
        self._zero_offset = 1 if layout == "gptq" else 0

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        words, n = shapes["qweight"]
        return n, words * 32 // self._bits

    def outline(self, shape: tuple[int, ...]) -> Weight:
        return outline_of(shape, self._bits, self._group, self._symmetric, self.name)

    def weight(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Weight:
        qweight, qzeros, scales = (tensors[name] for name in self.suffixes[:3])
        words, n = qweight.shape
        k = words * 32 // self._bits
        group = k if self._group == -1 else self._group
        check_group(group, k)
        if qzeros.shape != (k // group, n * self._bits // 32):
            raise shape_error("qzeros", qzeros.shape, (k // group, n * self._bits // 32))
        if scales.shape != (k // group, n):
            raise shape_error("scales", scales.shape, (k // group, n))
        order = tensors.get("g_idx")
        if order is not None and not np.array_equal(order, np.arange(k) // group):
            raise UnsupportedModel("desc_act: groups of inputs that are not neighbours (g_idx) are not supported")
        codes = unpack(np.ascontiguousarray(qweight.T), self._bits)
        zeros = unpack(qzeros, self._bits).astype(np.int32) + self._zero_offset
        return weight(codes, scales.T, zeros.T, self._bits, self.name)
