"""``ngram``: what came after the same tokens before will come again (prompt lookup decoding, Saxena 2023).

    ... the  mill  wheel  turns ...  the  mill  wheel  ?
        |---- match ----|            |--- the end ---|
                          turns ...  is the draft

Good where the answer repeats its prompt (edits of code, quotes) or itself. Costs no model, no memory and a look at the
sequence's own tokens.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from octavo.backends.base import Int32Array
from octavo.config import SpeculativeConfig
from octavo.worker.request_states import RequestStates


class NgramDrafter:
    """See SpeculativeConfig for what its numbers mean."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_tokens = config.num_speculative_tokens
        self._shortest, self._longest = config.lookup
        self._most_requests = config.disable_by_batch_size

    def propose(self, states: RequestStates, request_ids: Collection[str]) -> dict[str, list[int]]:
        if len(request_ids) > self._most_requests:
            return {}  # as many will be in the next step, more or less, so that nothing would be tried
        drafts = {}
        for request_id in request_ids:
            row = states.row_of.get(request_id)
            if row is not None and (draft := self.continuation(states.tokens(row))):
                drafts[request_id] = draft
        return drafts

    def continuation(self, token_ids: Int32Array) -> list[int]:
        """What followed the longest match of the end of ``token_ids`` [n], of equal ones the latest; empty without one.

        Where the sequence ends sooner than the draft, the draft goes on with its own tokens: the match is a period.
        """
        end = token_ids.size - 1  # position of the last token
        matches = np.flatnonzero(token_ids[:end] == token_ids[end])  # where matches would end
        length = 1
        while matches.size and length < self._longest:
            longer = matches[matches >= length]
            longer = longer[token_ids[longer - length] == token_ids[end - length]]
            if longer.size == 0:
                break
            matches, length = longer, length + 1
        if matches.size == 0 or length < self._shortest:
            return []
        match = int(matches[-1])
        following = match + 1 + np.arange(self._num_tokens) % (end - match)
        draft: list[int] = token_ids[following].tolist()
        return draft
