"""``thinking_token_budget``: after so many tokens of thinking the next one is the tag that closes it.

Where a grammar does not let it be the next one (within a character of several tokens, say), it is the first that may.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData

LIFT = 1e5  # exp(-LIFT / the highest temperature) is 0 in float32, and so is every other token's chance


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Lifts ``end`` out of reach of all others once ``budget`` tokens follow ``start`` (None: the prompt)."""

    budget: int
    start: int | None
    end: int

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        thought = token_ids[num_prompt_tokens:]
        if self.start is not None:
            begun = np.flatnonzero(thought == self.start)
            if begun.size == 0:
                return
            thought = thought[begun[0] + 1 :]
        if thought.size >= self.budget and not (thought == self.end).any():
            highest = row.max()
            row[self.end] = highest + LIFT if np.isfinite(highest) else LIFT


def make(request: NewRequestData) -> ThinkingBudget | None:
    """The processor ``request`` needs, or None."""
    params = request.sampling_params
    if params.thinking_token_budget is None or params.thinking is None:
        return None
    return ThinkingBudget(params.thinking_token_budget, params.thinking.start, params.thinking.end)
