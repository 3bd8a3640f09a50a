"""Drafts: guesses at the next tokens of one request, and whether they are worth trying. Knows no steps and no blocks.

    known tokens  | ... t8 t9 |           a plan without drafts computes t9 and samples t10
    with drafts   | ... t9 d10 d11 d12    computes all four and samples t10; if t10 is d10, t11; if t11 is d11, t12 ...

The scheduler lets drafts take what a plan has left over. Blocks that were taken for wrong drafts stay in the request's
table: its next tokens go there. A draft is no known token until the model has confirmed it, so no block of it has a
name in the prefix cache. The worker makes the guesses.

A wrong guess costs the time of a computed token. So a draft is no longer than what was right of the one before it, or
twice as long if all of it was. And a request of whose drafts nothing was right m times in a row tries none before
``2 ** m`` further tokens are known (64 at most); the first right guess ends that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

MOST_DOUBLINGS = 6  # of the pause after a failure


class Drafts:
    """``reach``: the tokens for which blocks were taken, whether or not the guesses among them were right."""

    __slots__ = ("_longest", "_num_failures", "_position", "_resume", "_token_ids", "reach")

    def __init__(self) -> None:
        self._longest = sys.maxsize
        self._num_failures = 0  # in a row
        self._resume = 0  # number of known tokens from which on to try again
        self.clear()

    def clear(self) -> None:
        """The request leaves the running set, without its blocks."""
        self._token_ids: Sequence[int] = ()
        self._position = 0
        self.reach = 0

    def offer(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """``token_ids`` may follow the first ``num_tokens`` tokens of the request."""
        self._token_ids, self._position = token_ids, num_tokens

    def after(self, num_tokens: int, most: int) -> Sequence[int]:
        """What to try behind the first ``num_tokens`` tokens, at most ``most`` of it."""
        due = num_tokens == self._position and num_tokens >= self._resume
        return self._token_ids[: max(0, min(most, self._longest))] if due else ()

    def judge(self, num_tokens: int, num_tried: int, num_right: int) -> None:
        """Of ``num_tried`` tokens behind the first ``num_tokens`` so many were right."""
        self._longest = 2 * num_tried if num_right == num_tried else max(1, num_right)
        self._num_failures = 0 if num_right else min(self._num_failures + 1, MOST_DOUBLINGS)
        self._resume = num_tokens + 2**self._num_failures
