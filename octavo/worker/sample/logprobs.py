"""Log-probabilities (or logits) of one row: the token itself, and the top k or the ids that were asked for.

With the default mode, ``raw_logprobs``, and a top k, the backend's sampler reports them; all else is done here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray
from octavo.messages import TokenLogprobs
from octavo.worker.sample.top_k import top_k

FLOOR = -9999.0  # the value clients of other engines know for "impossible"; JSON has no -inf


def rank_of(row: FloatArray, token_id: int) -> int:
    """1-based rank of ``token_id`` in the descending order of ``row``, ties in token id order."""
    value = row[token_id]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))


def log_sum_exp(row: FloatArray) -> float:
    """Natural logarithm of the sum of ``exp(row)``; the maximum of ``row`` is finite."""
    highest = row.max()
    return float(highest) + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))


def token_logprobs(
    row: FloatArray, token_id: int, k: int, *, ids: Sequence[int] | None = None, normalised: bool = True
) -> TokenLogprobs:
    """``token_id``, then ``ids``, or without these the ``min(k, vocab_size)`` most probable tokens.

    ``row`` is float32 ``[vocab_size]`` with a finite maximum. Values are natural log-softmax, or unless ``normalised``
    the numbers of the row themselves; all are at least -9999.
    """
    log_sum = log_sum_exp(row) if normalised else 0.0
    if ids is not None:
        others, ranks = list(ids), [rank_of(row, one) for one in ids]
    else:
        top: npt.NDArray[np.int64] = top_k(row, k) if k else np.empty(0, np.int64)
        others, ranks = top.tolist(), list(range(1, len(top) + 1))
    listed = [token_id, *others]
    values = [max(value - log_sum, FLOOR) for value in row[listed].tolist()]
    return TokenLogprobs(listed, values, [rank_of(row, token_id), *ranks])
