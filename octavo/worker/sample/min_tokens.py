"""``min_tokens``: tokens that would end the request are excluded until enough output exists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Excludes ``stops`` (int64 ids) while there are fewer than ``min_tokens`` output tokens."""

    min_tokens: int
    stops: npt.NDArray[np.int64]

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        if token_ids.size - num_prompt_tokens < self.min_tokens:
            row[self.stops] = -np.inf


def make(request: NewRequestData) -> MinTokens | None:
    """The processor ``request`` needs, or None. Under ``ignore_eos`` an EOS id ends nothing, so it stays allowed."""
    params = request.sampling_params
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops.update(request.output.eos_token_ids)
    if params.min_tokens == 0 or not stops:
        return None
    return MinTokens(params.min_tokens, np.array(sorted(stops), np.int64))
