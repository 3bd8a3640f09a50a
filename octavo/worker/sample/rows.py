"""Many rows at a time: the NumPy sampler behind the interface of ``backends.base.RowSampler``.

The reference, and what backends without a sampler of their own use. Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.backends.base import NOT_FINITE, NOTHING_ALLOWED, BitArray, FloatArray, SampledRows, SampleRows
from octavo.worker.sample.draw import inverse_cdf, uniform
from octavo.worker.sample.logprobs import token_logprobs
from octavo.worker.sample.min_p import min_p
from octavo.worker.sample.temperature import weights
from octavo.worker.sample.top_k import top_k
from octavo.worker.sample.top_p import top_p


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
    """See ``RowSampler.sample``; ``logits`` is float32 [R, vocab_size]."""
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
