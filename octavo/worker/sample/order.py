"""Descending order with ties in token id order: the one ranking that top-k, top-p and logprobs share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray


def descending(values: FloatArray) -> npt.NDArray[np.int64]:
    """Indices that sort float32 ``values`` (no NaN) downwards; equal values keep their order.

    Value and index are packed into one integer each, so a fast unstable sort gives the stable order.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # + 0 turns -0.0, which equals 0.0, into it
    # Map floats to integers that ascend as the floats descend.
    falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = (falling << np.uint64(32)) | np.arange(values.size, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
