"""AWQ (Lin et al., MLSys 2024) as AutoAWQ's GEMM layout stores it: 4 bits, a scale and a zero point per group.

``qweight`` int32 [K, N / 8], ``qzeros`` int32 [K / g, N / 8], ``scales`` [K / g, N]. A word holds eight neighbouring
outputs, in the order 0 2 4 6 1 3 5 7 from its lowest bits up.
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

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQ:
    """See ``Scheme``. Raises UnsupportedModel for other layouts than GEMM and other widths than 4 bits."""

    name = "AWQ"
    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_bits(setting(config, ("bits", "w_bit"), int), (4,))
        self._group = setting(config, ("group_size", "q_group_size"), int)
        version = setting(config, ("version",), str, "gemm")
        if version.lower() != "gemm":
            raise UnsupportedModel(f"version {version!r}: must be gemm")
        if not setting(config, ("zero_point",), bool, True):
            raise UnsupportedModel("zero_point = false: must be true")

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        k, words = shapes["qweight"]
        return words * 8, k

    def outline(self, shape: tuple[int, ...]) -> Weight:
        return outline_of(shape, 4, self._group, symmetric=False, source=self.name)

    def weight(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Weight:
        qweight, qzeros, scales = (tensors[name] for name in self.suffixes)
        k, words = qweight.shape
        group = k if self._group == -1 else self._group
        check_group(group, k)
        if qzeros.shape != (k // group, words):
            raise shape_error("qzeros", qzeros.shape, (k // group, words))
        if scales.shape != (k // group, words * 8):
            raise shape_error("scales", scales.shape, (k // group, words * 8))
        codes, zeros = unpack(qweight, 4, ORDER), unpack(qzeros, 4, ORDER)
        return weight(np.ascontiguousarray(codes.T), scales.T, zeros.T, 4, self.name)
