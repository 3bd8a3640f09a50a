"""Top-p (nucleus): the smallest set of most probable tokens that holds the mass (Holtzman et al., arXiv 1904.09751)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray
from octavo.worker.sample.order import descending

# Relative to the greatest weight. Everything above a threshold is a head of the sorted list; the first head that
# holds the mass is sorted, instead of the whole vocabulary.
THRESHOLDS = (2.0**-6, 2.0**-10, 2.0**-14, 0.0)


def top_p(weights: FloatArray, mass: float) -> npt.NDArray[np.int64]:
    """Indices of the nucleus of ``weights`` (float32, greatest = 1, any sum), most probable first.

    The smallest head of the descending order (ties: lowest index first) with at least ``mass`` of the total; never
    empty.
    """
    wanted = mass * float(weights.sum(dtype=np.float64))
    for threshold in THRESHOLDS:
        head = np.flatnonzero(weights >= np.float32(threshold))
        values = weights[head]
        if threshold == 0.0 or float(values.sum(dtype=np.float64)) >= wanted:
            break
    order = descending(values)
    total = np.cumsum(values[order], dtype=np.float64)
    # Rounding may leave the last sum a little below ``wanted``: then the slice keeps everything.
    return head[order[: int(np.searchsorted(total, wanted)) + 1]]
