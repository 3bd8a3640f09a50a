"""The sampler in NumPy: rows of logits to tokens, each row alone.

What every backend's own sampler is compared with, and the sampler of backends that compute in NumPy. The order is
temperature, top-k, min-p, top-p, one draw. Equal logits rank by id. Knows nothing of requests, steps or programs.

Random numbers are Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the
request, with the token's position as the counter: no state, so neither batch nor preemption can shift a stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    BitArray,
    FloatArray,
    RowChoice,
    SampledRows,
    SampleRows,
)
from octavo.exceptions import KernelError
from octavo.messages import TokenLogprobs

MASK64 = 2**64 - 1
CHUNK = 256  # of weights, summed before any is looked at
FLOOR = -9999.0  # the value clients of other engines know for "impossible"; JSON has no -inf


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


def top_k(row: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """Ids of the ``min(k, row.size)`` greatest entries of ``row``, greatest first; among equals the lowest id."""
    if k >= row.size:
        return descending(row)
    threshold = np.partition(row, row.size - k)[row.size - k]
    ids = np.flatnonzero(row >= threshold)
    return ids[descending(row[ids])[:k]]


def weights(logits: FloatArray, temperature: float) -> FloatArray:
    """``exp((logits - max) / temperature)``: float32, the greatest is exactly 1. ``logits`` has a finite maximum."""
    out = logits - logits.max()
    out /= np.float32(temperature)
    return np.exp(out, out=out)


def min_p(weights: FloatArray, threshold: float) -> npt.NDArray[np.int64]:
    """Indices, in order, of the entries of ``weights`` (greatest = 1) that are at least ``threshold``."""
    return np.flatnonzero(weights >= np.float32(threshold))


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


def candidates(row: FloatArray, want: np.void) -> tuple[npt.NDArray[np.int64] | None, FloatArray]:
    """(ids, weights): what is left of ``row`` after temperature, top-k, min-p and top-p; ids None: everything.

    ``row`` has a finite maximum; ``want`` is a SAMPLE_ROW with a positive temperature.
    """
    ids, k = None, int(want["top_k"])
    # Top-k and min-p both keep a head of the same ranking, so their order is free: top-k first leaves less to do.
    if 0 < k < row.size:
        ids = top_k(row, k)
        row = row[ids]
    mass = weights(row, float(want["temperature"]))
    if want["min_p"] > 0.0:
        kept = min_p(mass, float(want["min_p"]))
        ids, mass = (kept if ids is None else ids[kept]), mass[kept]
    if want["top_p"] < 1.0:
        kept = top_p(mass, float(want["top_p"]))
        ids, mass = (kept if ids is None else ids[kept]), mass[kept]
    return ids, mass


def choose(row: FloatArray, want: np.void) -> int:
    """The token of ``row`` (finite maximum) that ``want``, a SAMPLE_ROW, asks for: greedy, or one of the candidates."""
    if want["temperature"] == 0.0:
        return int(row.argmax())
    ids, mass = candidates(row, want)
    u = uniform(int(want["seed"]), int(want["sample_index"]), int(want["position"]))
    index = inverse_cdf(mass, u)
    return index if ids is None else int(ids[index])


def processed(row: FloatArray, want: np.void, token_id: int) -> FloatArray:
    """Logits as the draw saw them: ``row`` over the temperature, -inf for what the filters dropped. Greedy: ``row``.

    ``token_id`` was drawn, so it is never dropped, should a backend's rounding have kept one more than is kept here.
    """
    if want["temperature"] == 0.0:
        return row
    ids, _ = candidates(row, want)
    scaled = row / want["temperature"]
    if ids is None:
        return scaled
    out = np.full_like(row, -np.inf)
    kept = np.append(ids, token_id)
    out[kept] = scaled[kept]
    return out


def masked(row: FloatArray, mask: npt.NDArray[np.uint32]) -> FloatArray:
    """A copy of ``row`` with -inf where ``mask`` has no bit."""
    allowed = np.unpackbits(mask.view(np.uint8), count=row.size, bitorder="little").view(np.bool_)
    return np.where(allowed, row, np.float32(-np.inf))


def sample_rows(
    logits: FloatArray, rows: SampleRows, adjusted: FloatArray | None, masks: BitArray | None
) -> SampledRows:
    """See ``StepOutputs.sample``; ``logits`` is float32 [R, vocab_size]."""
    out = SampledRows.empty(rows)
    for i, want in enumerate(rows):
        raw = logits[want["logit_row"]]
        out.token_ids[i] = NOT_FINITE
        if not np.isfinite(raw).all():
            continue
        token, k = int(want["given_token"]), int(want["num_logprobs"])
        if token < 0:
            other, mask = int(want["adjusted_row"]), int(want["mask_row"])
            row = raw if adjusted is None or other < 0 else adjusted[other]
            row = row if masks is None or mask < 0 else masked(row, masks[mask])
            if row.max() == -np.inf:
                out.token_ids[i] = NOTHING_ALLOWED
                continue
            token = choose(row, want)
        out.token_ids[i] = token
        if k >= 0:
            entry = token_logprobs(raw, token, k)
            count = len(entry.token_ids)
            out.logprob_ids[i, :count], out.logprobs[i, :count] = entry.token_ids, entry.logprobs
            out.ranks[i] = entry.ranks[0]
    return out


class ArrayOutputs:
    """Outputs of a run that lie in NumPy arrays, float32 [rows, width] each; see ``StepOutputs``."""

    def __init__(self, arrays: Mapping[str, FloatArray]) -> None:
        self._arrays = arrays

    def rows(self, output: str, chosen: RowChoice = slice(None)) -> FloatArray:
        if output not in self._arrays:
            raise KernelError(f"the program has no output {output!r}")
        rows: FloatArray = self._arrays[output][chosen]
        return rows

    def sample(self, rows: SampleRows, adjusted: FloatArray | None, masks: BitArray | None) -> SampledRows:
        return sample_rows(self.rows("logits"), rows, adjusted, masks)
