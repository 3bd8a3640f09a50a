"""Drafters: guesses at the next tokens of a sequence. The model checks every one, so a bad guess only costs time.

A drafter knows the requests' tokens; neither steps nor how its guesses fare.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from octavo.worker.request_states import RequestStates


class Drafter(Protocol):
    """Asked once a step."""

    def propose(self, states: RequestStates, request_ids: Collection[str]) -> dict[str, list[int]]:
        """For those of ``request_ids`` that have a row and for which it has a guess: one token id or more.

        They would follow the request's last known token. Changes nothing in ``states``.
        """
        ...


class NullDrafter:
    """No guesses."""

    def propose(self, states: RequestStates, request_ids: Collection[str]) -> dict[str, list[int]]:
        return {}
