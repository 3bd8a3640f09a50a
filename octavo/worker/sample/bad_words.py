"""``bad_words``: a token that would complete a banned sequence is excluded.

Only the output counts: a sequence that the prompt begins is not completed by the answer. Of a sequence of several
tokens the last one is excluded, and only while the output ends with all the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData


@dataclass(frozen=True, slots=True)
class BadWords:
    """Excludes ``always`` (int64 ids); after token ``t``, for each ``(begin, last)`` in ``after[t]`` whose ``begin``
    (int32 ids, the last of them ``t``) the output ends with, excludes ``last``."""

    always: npt.NDArray[np.int64]
    after: dict[int, list[tuple[Int32Array, int]]]

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        row[self.always] = -np.inf
        output = token_ids[num_prompt_tokens:]
        if output.size == 0:
            return
        for begin, last in self.after.get(int(output[-1]), ()):
            if np.array_equal(output[-begin.size :], begin):
                row[last] = -np.inf


def make(request: NewRequestData) -> BadWords | None:
    """The processor ``request`` needs, or None."""
    sequences = request.output.bad_words_token_ids
    if not sequences:
        return None
    after: dict[int, list[tuple[Int32Array, int]]] = {}
    for sequence in sequences:
        if len(sequence) > 1:
            after.setdefault(sequence[-2], []).append((np.array(sequence[:-1], np.int32), sequence[-1]))
    return BadWords(np.array([s[0] for s in sequences if len(s) == 1], np.int64), after)
