"""Log-probabilities of the raw logits: the token itself and the top k."""

from __future__ import annotations

import math

import numpy as np

from octavo.backends.base import FloatArray
from octavo.messages import TokenLogprobs
from octavo.worker.sample.top_k import top_k

FLOOR = -9999.0  # the value clients of other engines know for "impossible"; JSON has no -inf


def rank_of(row: FloatArray, token_id: int) -> int:
    """1-based rank of ``token_id`` in the descending order of ``row``, ties in token id order."""
    value = row[token_id]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))


def token_logprobs(row: FloatArray, token_id: int, k: int) -> TokenLogprobs:
    """``token_id``, then the ``min(k, vocab_size)`` most probable tokens, with natural log-softmax values.

    ``row`` is float32 ``[vocab_size]`` with a finite maximum. All values are at least -9999.
    """
    highest = row.max()
    log_sum = float(highest) + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    top = top_k(row, k) if k else np.empty(0, np.int64)
    ids = [token_id, *top.tolist()]
    values = [max(value - log_sum, FLOOR) for value in row[ids].tolist()]
    return TokenLogprobs(ids, values, [rank_of(row, token_id), *range(1, len(top) + 1)])
