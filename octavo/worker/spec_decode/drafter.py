"""Drafters: guesses at the next tokens of a sequence. The model checks every one, so a bad guess only costs time.

A drafter knows the requests' tokens; neither steps nor how its guesses fare.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from octavo.worker.request_states import RequestStates


class Drafter(Protocol):
    """Asked once a step. ``num_tokens`` is the length of its longest draft."""

    num_tokens: int

    def propose(self, states: RequestStates, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """For those of ``request_ids`` that have a row and for which it has a guess: 1 to ``num_tokens`` token ids.

        They would follow the request's last known token. Changes nothing in ``states``.
        """
        ...


class NullDrafter:
    """No guesses."""

    num_tokens = 0

    def propose(self, states: RequestStates, request_ids: Iterable[str]) -> dict[str, list[int]]:
        return {}


def max_sampled_rows(max_seqs: int, max_tokens: int, drafter: Drafter) -> int:
    """Most rows of logits that a step of ``max_tokens`` tokens samples from."""
    return min(max_seqs * (1 + drafter.num_tokens), max(max_seqs, max_tokens))
