"""Repetition, frequency and presence penalties.

Computed afresh from the request's tokens at every step, so that there is no count that preemption, recomputation or
a prefix-cache hit could leave wrong: the border between prompt and output is ``num_prompt_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData


@dataclass(frozen=True, slots=True)
class Penalties:
    """``repetition`` (CTRL, arXiv 1909.05858) covers prompt and output; the other two (OpenAI's) output only.

    repetition: a positive logit is divided by it, a negative one multiplied.
    frequency: ``logit -= frequency * count``;  presence: ``logit -= presence`` once.
    """

    repetition: float
    frequency: float
    presence: float

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        if self.repetition != 1.0:
            # A token that occurs twice is read before it is written, so it is penalised once.
            seen = row[token_ids]
            factor = np.float32(self.repetition)
            row[token_ids] = np.where(seen > 0, seen / factor, seen * factor)
        output = token_ids[num_prompt_tokens:]
        if output.size == 0:
            return
        if self.frequency != 0.0:
            counts = np.bincount(output)
            row[: counts.size] -= np.float32(self.frequency) * counts.astype(np.float32)
        if self.presence != 0.0:
            row[output] = row[output] - np.float32(self.presence)


def make(request: NewRequestData) -> Penalties | None:
    """The processor ``request`` needs, or None."""
    params = request.sampling_params
    penalties = Penalties(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return None if penalties == Penalties(1.0, 0.0, 0.0) else penalties
