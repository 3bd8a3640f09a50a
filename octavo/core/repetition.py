"""Has the output begun to repeat itself? One answer a token. Knows nothing of requests or of the prompt.

A pattern of p tokens stands c times in a row at the end exactly if the last p * (c - 1) tokens each equal the one p
places before them. So for each p the length of that run is kept, and a token only touches the p at which it continues
one: the distances to its own earlier places, at most ``max_pattern_size`` of them, and mostly few.
"""

from __future__ import annotations

from typing import Protocol

from octavo.messages import RepetitionDetectionParams


class RepetitionDetector(Protocol):
    """Told every output token, in order."""

    def feed(self, token_id: int) -> bool:
        """True if the output now ends with a pattern that is repeated often enough."""
        ...


class PatternDetector:
    """See RepetitionDetectionParams for what counts as a repetition."""

    __slots__ = ("_count", "_high", "_low", "_num_tokens", "_places", "_runs")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._low, self._high = max(1, params.min_pattern_size), params.max_pattern_size
        self._count = params.min_count
        self._num_tokens = 0
        self._places: dict[int, list[int]] = {}  # of each token, ascending, the last ``_high`` at least
        self._runs: dict[int, int] = {}  # pattern size -> length of its run; 0 if absent

    def feed(self, token_id: int) -> bool:
        at = self._num_tokens
        self._num_tokens += 1
        places = self._places.setdefault(token_id, [])
        runs = {}
        for place in reversed(places):
            size = at - place
            if size > self._high:
                break
            if size >= self._low:
                runs[size] = self._runs.get(size, 0) + 1
        self._runs = runs
        places.append(at)
        if len(places) > 2 * self._high:
            del places[: -self._high]
        return any(run >= size * (self._count - 1) for size, run in runs.items())


class NullDetector:
    """For requests that may repeat themselves."""

    __slots__ = ()

    def feed(self, token_id: int) -> bool:
        return False


def repetition_detector(params: RepetitionDetectionParams | None) -> RepetitionDetector:
    """The detector that a request asks for."""
    return PatternDetector(params) if params is not None and params.max_pattern_size > 0 else NullDetector()
