"""From a row of logits to a token, one request at a time.

Order: raw logits (logprobs are taken here) -> processors in ``PROCESSORS`` order -> greedy, or temperature, min-p,
top-k, top-p, draw. Every number depends on the row and on its request alone, so a token is the same in any batch.
Knows nothing of steps, rows of the batch or the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.backends.base import FloatArray, Int32Array
from octavo.exceptions import RequestError
from octavo.messages import NewRequestData, SamplingParams, TokenLogprobs
from octavo.worker.sample import allowed_token_ids, logit_bias, min_tokens, penalties
from octavo.worker.sample.draw import inverse_cdf, uniform
from octavo.worker.sample.logprobs import token_logprobs
from octavo.worker.sample.min_p import min_p
from octavo.worker.sample.processor import LogitsProcessor
from octavo.worker.sample.temperature import weights
from octavo.worker.sample.top_k import top_k
from octavo.worker.sample.top_p import top_p

DEFAULT_SEED = 0  # the front end always sends a seed; this one serves direct users of the worker

# The order is the meaning: a mask set early is respected by everything after it.
PROCESSORS: tuple[Callable[[NewRequestData], LogitsProcessor | None], ...] = (
    allowed_token_ids.make,
    min_tokens.make,
    logit_bias.make,
    penalties.make,
)


@dataclass(frozen=True, slots=True)
class RequestSampler:
    """How one request chooses its tokens; made once per request."""

    params: SamplingParams
    processors: tuple[LogitsProcessor, ...]
    seed: int
    sample_index: int

    @classmethod
    def of(cls, request: NewRequestData) -> RequestSampler:
        params = request.sampling_params
        processors = tuple(p for make in PROCESSORS if (p := make(request)) is not None)
        seed = DEFAULT_SEED if params.seed is None else params.seed
        return cls(params, processors, seed, request.sample_index)

    @property
    def takes_argmax(self) -> bool:
        """Whether the token is simply the greatest raw logit, and nothing else is asked for."""
        return self.params.greedy and not self.processors and self.params.logprobs is None

    def sample(
        self, raw: FloatArray, token_ids: Int32Array, num_prompt_tokens: int
    ) -> tuple[int, TokenLogprobs | None]:
        """The next token after ``token_ids`` (prompt + output, int32) and its logprobs if asked for.

        ``raw`` is float32 ``[vocab_size]``, finite, and left unchanged. Raises RequestError when the request's own
        masks exclude every token or its penalties overflow.
        """
        row = raw
        if self.processors:
            row = raw.copy()
            for processor in self.processors:
                processor.apply(row, token_ids, num_prompt_tokens)
            highest = row.max()
            if highest == -np.inf:
                raise RequestError("no token is left: allowed_token_ids and min_tokens exclude them all")
            if not np.isfinite(highest):
                raise RequestError("the penalties of this request overflow float32")
        token_id = int(row.argmax()) if self.params.greedy else self._draw(row, token_ids.size)
        if self.params.logprobs is None:
            return token_id, None
        return token_id, token_logprobs(raw, token_id, self.params.logprobs)

    def _draw(self, row: FloatArray, position: int) -> int:
        """A random token of ``row`` for ``position`` in the sequence."""
        params, ids = self.params, None
        # Top-k and min-p both keep a head of the same ranking, so their order is free: top-k first leaves less to do.
        if 0 < params.top_k < row.size:
            ids = top_k(row, params.top_k)
            row = row[ids]
        mass = weights(row, params.temperature)
        if params.min_p > 0.0:
            kept = min_p(mass, params.min_p)
            ids, mass = (kept if ids is None else ids[kept]), mass[kept]
        if params.top_p < 1.0:
            kept = top_p(mass, params.top_p)
            ids, mass = (kept if ids is None else ids[kept]), mass[kept]
        index = inverse_cdf(mass, uniform(self.seed, self.sample_index, position))
        return index if ids is None else int(ids[index])
