"""How one request turns logits into tokens.

Order: raw logits (logprobs are taken here, unless the mode says processed) -> processors in ``PROCESSORS`` order ->
greedy, or temperature, top-k, min-p, top-p, draw. The processors run here, and only for requests that have any; all the
rest is a row of numbers (``SAMPLE_ROW``) that the backend's sampler obeys. Every number depends on
the row and on its request alone, so a token is the same in any batch. Knows nothing of steps, rows of the batch or the
KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.base import SAMPLE_ROW, FloatArray, Int32Array, SampleRows
from octavo.backends.sampling import MASK64, processed, token_logprobs
from octavo.config import LogprobsMode
from octavo.exceptions import ValidationError
from octavo.messages import NewRequestData, TokenLogprobs
from octavo.worker.sample.processors import PROCESSORS, LogitsProcessor

DEFAULT_SEED = 0  # the front end always sends a seed; this one serves direct users of the worker


def sample_row(request: NewRequestData, vocab_size: int) -> SampleRows:
    """What the request wants of every row: SAMPLE_ROW ``[1]``, without position and places."""
    params = request.sampling_params
    row = np.zeros(1, SAMPLE_ROW)
    row["seed"] = (DEFAULT_SEED if params.seed is None else params.seed) & MASK64
    row["sample_index"] = request.sample_index
    row["top_p"], row["min_p"] = params.top_p, params.min_p
    row["temperature"] = 0.0 if params.greedy else params.temperature
    row["top_k"] = min(params.top_k, vocab_size)
    row["num_logprobs"] = -1 if not params.wants_logprobs else _count(params.logprobs, vocab_size)
    row["given_token"] = row["adjusted_row"] = row["mask_row"] = -1
    return row


def _count(asked: int | None, vocab_size: int) -> int:
    """How many logprobs beside the token's own: -1 asks for all."""
    return vocab_size if asked == -1 else min(asked or 0, vocab_size)


@dataclass(frozen=True, slots=True)
class RequestSampler:
    """What one request does to its logits; made once per request."""

    processors: tuple[LogitsProcessor, ...]
    row: SampleRows  # [1]
    num_prompt_logprobs: int  # 0 also when it wants none
    logprob_ids: list[int] | None  # instead of the top k
    prompt_logprob_ids: list[int] | None

    @classmethod
    def of(cls, request: NewRequestData, vocab_size: int) -> RequestSampler:
        params = request.sampling_params
        return cls(
            processors=tuple(p for make in PROCESSORS if (p := make(request)) is not None),
            row=sample_row(request, vocab_size),
            num_prompt_logprobs=_count(params.prompt_logprobs, vocab_size),
            logprob_ids=params.logprob_token_ids or None,
            prompt_logprob_ids=params.prompt_logprob_token_ids,
        )

    def adjust(self, raw: FloatArray, token_ids: Int32Array, num_prompt_tokens: int, row: FloatArray) -> None:
        """Fill ``row`` with ``raw`` (float32 ``[vocab_size]``, finite) after the processors.

        ``token_ids`` is prompt + output, int32. Raises ValidationError when the request's own masks exclude every token
        or its penalties overflow.
        """
        row[:] = raw
        for processor in self.processors:
            processor.apply(row, token_ids, num_prompt_tokens)
        highest = row.max()
        if highest == -np.inf:
            raise ValidationError("no token is left: allowed_token_ids, bad_words and min_tokens exclude them all")
        if not np.isfinite(highest):
            raise ValidationError("the penalties of this request overflow float32")

    def logprobs(self, mode: LogprobsMode, raw: FloatArray, adjusted: FloatArray, token_id: int) -> TokenLogprobs:
        """What ``token_id``, chosen from ``adjusted`` (which was ``raw``), and the others that are asked for come with.

        For what the backend's sampler does not report: other modes than ``raw_logprobs``, and ids of the request's own.
        """
        row = raw if mode.startswith("raw") else processed(adjusted, self.row[0], token_id)
        k = int(self.row["num_logprobs"][0])
        return token_logprobs(row, token_id, k, ids=self.logprob_ids, normalised=mode.endswith("logprobs"))

    def prompt_logprobs(self, mode: LogprobsMode, raw: FloatArray, token_id: int) -> TokenLogprobs:
        """The same of a prompt's token, to which no processor applies."""
        ids, normalised = self.prompt_logprob_ids, mode.endswith("logprobs")
        return token_logprobs(raw, token_id, self.num_prompt_logprobs, ids=ids, normalised=normalised)
