"""Top-k: the k greatest logits (Fan et al., arXiv 1805.04833)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray
from octavo.worker.sample.order import descending


def top_k(row: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """Ids of the ``min(k, row.size)`` greatest entries of ``row``, greatest first; among equals the lowest id."""
    if k >= row.size:
        return descending(row)
    threshold = np.partition(row, row.size - k)[row.size - k]
    ids = np.flatnonzero(row >= threshold)
    return ids[descending(row[ids])[:k]]
