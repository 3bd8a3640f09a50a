"""Min-p: tokens at least ``min_p`` times as probable as the most probable one (arXiv 2407.01082)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray


def min_p(weights: FloatArray, threshold: float) -> npt.NDArray[np.int64]:
    """Indices, in order, of the entries of ``weights`` (greatest = 1) that are at least ``threshold``."""
    return np.flatnonzero(weights >= np.float32(threshold))
