"""Random numbers as a pure function of their key, and the draw by inverse cumulative distribution.

The number is Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the
request, with the token's position as the counter: no state, so neither batch nor preemption can shift a stream.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.base import FloatArray

MASK64 = 2**64 - 1
CHUNK = 256


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, for the token at ``position`` of sample ``sample_index``."""
    key = np.array([seed & MASK64, sample_index], np.uint64)
    counter = np.array([position, 0, 0, 0], np.uint64)
    return float(np.random.Philox(key=key, counter=counter).random_raw() >> 11) * 2.0**-53


def _first_above(weights: FloatArray, target: float) -> tuple[int, float]:
    """First index whose running sum exceeds ``target`` (else the last positive entry), and the sum before it."""
    sums = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(sums, min(target, np.nextafter(sums[-1], 0.0)), side="right"))
    return index, float(sums[index - 1]) if index else 0.0


def inverse_cdf(weights: FloatArray, u: float) -> int:
    """The index whose interval of the cumulative distribution holds ``u`` in [0, 1). Never an entry of weight 0.

    ``weights`` is float32 with a positive sum. Sums chunks of 256 first, so that only one chunk is scanned.
    """
    whole = weights.size - weights.size % CHUNK
    sums = weights[:whole].reshape(-1, CHUNK).sum(axis=1)
    if whole < weights.size:
        sums = np.append(sums, weights[whole:].sum())
    target = u * float(sums.sum(dtype=np.float64))
    chunk, before = _first_above(sums, target)
    start = chunk * CHUNK
    return start + _first_above(weights[start : start + CHUNK], target - before)[0]
