"""Top-p (nucleus): the smallest set of most probable tokens that holds the mass (Holtzman et al., arXiv 1904.09751)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray

# Relative to the greatest weight. The entries above it are a head of the ranking, and in most steps that head holds the
# mass: then it is sorted instead of the whole vocabulary.
HEAD = np.float32(2.0**-12)


def top_p(weights: FloatArray, mass: float) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the nucleus of ``weights`` (float32, greatest = 1, any sum).

    The smallest head of the descending order (ties: lowest index first) with at least ``mass`` of the total; never
    empty.
    """
    wanted = mass * float(weights.sum(dtype=np.float64))
    head = np.flatnonzero(weights >= HEAD)
    values = weights[head]
    if float(values.sum(dtype=np.float64)) >= wanted:
        return head[_nucleus(values, wanted)]
    return np.flatnonzero(_nucleus(weights, wanted))


def _nucleus(values: FloatArray, wanted: float) -> npt.NDArray[np.bool_]:
    """Which of ``values`` are in the smallest head with sum ``wanted``; all of them if rounding leaves less.

    Only values are sorted: the set is what lies above the last one that is needed, and as many of its equals.
    """
    falling = np.sort(values)[::-1]
    sums = np.cumsum(falling, dtype=np.float64)
    count = min(int(np.searchsorted(sums, wanted)) + 1, sums.size)
    kept = values > falling[count - 1]
    equals = np.flatnonzero(values == falling[count - 1])
    kept[equals[: count - np.count_nonzero(kept)]] = True
    return kept
