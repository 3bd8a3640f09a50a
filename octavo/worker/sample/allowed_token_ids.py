"""``allowed_token_ids``: every other token is excluded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData


@dataclass(frozen=True, slots=True)
class AllowedTokenIds:
    """Keeps the logits of ``allowed`` (int64 ids)."""

    allowed: npt.NDArray[np.int64]

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        kept = row[self.allowed]
        row.fill(-np.inf)
        row[self.allowed] = kept


def make(request: NewRequestData) -> AllowedTokenIds | None:
    """The processor ``request`` needs, or None."""
    allowed = request.sampling_params.allowed_token_ids
    return None if allowed is None else AllowedTokenIds(np.array(allowed, np.int64))
