"""Token ids to text, a step at a time, and stop strings.

Every shown character is whole: bytes of an unfinished one wait in the UTF-8 decoder. Text that may yet turn out to be
the beginning of a stop string waits too, and only that. Stop strings are followed one character at a time by
Knuth-Morris-Pratt automata, so where tokens are cut never matters and the cost is O(1) per character. This module does
not know why a request finishes; it only finds stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from octavo.messages import SamplingParams
from octavo.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DetokenizerUpdate:
    """``delta``: text to show now; ``stop_string``: the one that was just completed (the text is final then).

    ``num_tokens``: how many of the tokens were taken in; those behind a stop string were not.
    """

    delta: str
    stop_string: str | None
    num_tokens: int = 0


class IncrementalDetokenizer:
    """The text of one request's output.

    The deltas joined equal ``tokenizer.decode(output_ids, skip_special_tokens=...)`` up to the stop. The one exception
    is the space that SentencePiece drops at the start of a text: an output that continues a prompt keeps it.

    Of several stop strings the one completed first wins, of those completed together the longest. A special token that
    is not shown still stops if its text is a stop string. Stop strings completed by fewer than ``min_tokens`` tokens
    are ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, sampling_params: SamplingParams, prompt_token_ids: Sequence[int]):
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids if sampling_params.skip_special_tokens else frozenset()
        if sampling_params.shown_special_token_ids:
            self._hidden = self._hidden.difference(sampling_params.shown_special_token_ids)
        self._enabled = sampling_params.detokenize
        self._min_tokens = sampling_params.min_tokens
        self._include_stop = sampling_params.include_stop_str_in_output
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(sampling_params.stop)]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_leading_space and not any(
            self._token_bytes(i) for i in prompt_token_ids if i not in self._hidden
        )
        self._num_tokens = 0
        self._shown: list[str] = []
        self._pending = ""  # decoded but not shown
        self._stop_string: str | None = None
        self._closed = False

    @property
    def text(self) -> str:
        """All that has been shown: the deltas joined."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop_string

    def update(self, new_token_ids: Sequence[int], finished: bool) -> DetokenizerUpdate:
        """Take the tokens of one step. ``finished``: no more will come, so nothing is held back.

        Tokens after a stop string, and after the end, are ignored.
        """
        if self._closed or not self._enabled:
            return DetokenizerUpdate("", None)
        before = self._num_tokens
        for token_id in new_token_ids:
            self._num_tokens += 1
            if token_id in self._hidden:
                self._check_hidden(token_id)
            else:
                self._append(self._decoder.decode(self._token_bytes(token_id)))
            if self._stop_string is not None:
                break
        if finished and self._stop_string is None:
            self._append(self._decoder.decode(b"", final=True))
        self._closed = finished or self._stop_string is not None
        return DetokenizerUpdate(self._show(), self._stop_string, self._num_tokens - before)

    def _append(self, piece: str) -> None:
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(" ")
        for at, char in enumerate(piece) if self._matchers else ():
            completed = [m.pattern for m in self._matchers if m.feed(char)]
            if completed and self._num_tokens >= self._min_tokens:
                self._pending += piece[: at + 1]
                self._stop_string = max(completed, key=len)
                if not self._include_stop:
                    self._pending = self._pending[: -len(self._stop_string)]
                return
        self._pending += piece

    def _check_hidden(self, token_id: int) -> None:
        if not self._matchers or self._num_tokens < self._min_tokens:
            return
        text = self._token_bytes(token_id).decode("utf-8", errors="replace")
        if any(m.pattern == text for m in self._matchers):
            self._append(self._decoder.decode(b"", final=True))
            if self._stop_string is None:
                self._stop_string = text
                self._pending += text if self._include_stop else ""

    def _show(self) -> str:
        """Move what can no longer become part of a stop string from pending to shown."""
        held = 0 if self._closed or self._include_stop else max((m.held for m in self._matchers), default=0)
        cut = len(self._pending) - held
        delta, self._pending = self._pending[:cut], self._pending[cut:]
        if delta:
            self._shown.append(delta)
        return delta


@lru_cache(maxsize=512)  # the samples of a request have the same stop strings, and they may be long
def _borders(pattern: str) -> list[int]:
    """[i]: length of the longest proper border of ``pattern[:i + 1]``."""
    border = [0] * len(pattern)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = border[k - 1]
        k += pattern[i] == pattern[k]
        border[i] = k
    return border


class _Matcher:
    """Knuth-Morris-Pratt: after any text, how long a beginning of ``pattern`` the text ends with."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self._border = _borders(pattern)
        self._matched = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become a match."""
        return self._border[-1] if self._matched == len(self.pattern) else self._matched

    def feed(self, char: str) -> bool:
        """True if ``pattern`` ends with this character."""
        k = self._matched
        if k == len(self.pattern):
            k = self._border[k - 1]
        while k and self.pattern[k] != char:
            k = self._border[k - 1]
        self._matched = k + (self.pattern[k] == char)
        return self._matched == len(self.pattern)
