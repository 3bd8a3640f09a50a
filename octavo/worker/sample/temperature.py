"""Temperature: from logits to unnormalised probabilities."""

from __future__ import annotations

import numpy as np

from octavo.backends.base import FloatArray


def weights(logits: FloatArray, temperature: float) -> FloatArray:
    """``exp((logits - max) / temperature)``: float32, the greatest is exactly 1. ``logits`` has a finite maximum."""
    out = logits - logits.max()
    out /= np.float32(temperature)
    return np.exp(out, out=out)
