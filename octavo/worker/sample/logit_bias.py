"""``logit_bias``: numbers added to the logits of single tokens (OpenAI's field)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Adds ``bias[i]`` (float32) to the logit of ``ids[i]`` (int64)."""

    ids: npt.NDArray[np.int64]
    bias: FloatArray

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        row[self.ids] += self.bias


def make(request: NewRequestData) -> LogitBias | None:
    """The processor ``request`` needs, or None."""
    bias = request.sampling_params.logit_bias
    if not bias:
        return None
    return LogitBias(np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
