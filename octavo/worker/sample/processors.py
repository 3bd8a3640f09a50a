"""Logits processors: what a request does to its own logits before a token is chosen, one class each.

A processor sees one row of one request and is a pure function of the row and the request's tokens. A new one is a
class, a ``make_...`` function and a line in ``PROCESSORS``. Knows nothing of batches, steps or the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.backends.base import FloatArray, Int32Array
from octavo.messages import NewRequestData

LIFT = 1e5  # exp(-LIFT / the highest temperature) is 0 in float32, and so is every other token's chance


class LogitsProcessor(Protocol):
    """Changes one row of logits in place, as a pure function of the row and the request's tokens."""

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        """``row`` is float32 ``[vocab_size]``; ``token_ids`` is prompt + output so far, int32 ``[num_tokens]``.

        A token is excluded by setting its logit to -inf.
        """
        ...


@dataclass(frozen=True, slots=True)
class AllowedTokenIds:
    """``allowed_token_ids``: keeps the logits of ``allowed`` (int64 ids); every other token is excluded."""

    allowed: npt.NDArray[np.int64]

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        kept = row[self.allowed]
        row.fill(-np.inf)
        row[self.allowed] = kept


def make_allowed_token_ids(request: NewRequestData) -> AllowedTokenIds | None:
    """The processor ``request`` needs, or None."""
    allowed = request.sampling_params.allowed_token_ids
    return None if allowed is None else AllowedTokenIds(np.array(allowed, np.int64))


@dataclass(frozen=True, slots=True)
class BadWords:
    """``bad_words``: a token that would complete a banned sequence is excluded.

    Only the output counts: a sequence that the prompt begins is not completed by the answer. Of a sequence of several
    tokens the last one is excluded, and only while the output ends with all the others.

    Excludes ``always`` (int64 ids); after token ``t``, for each ``(begin, last)`` in ``after[t]`` whose ``begin``
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


def make_bad_words(request: NewRequestData) -> BadWords | None:
    """The processor ``request`` needs, or None."""
    sequences = request.output.bad_words_token_ids
    if not sequences:
        return None
    after: dict[int, list[tuple[Int32Array, int]]] = {}
    for sequence in sequences:
        if len(sequence) > 1:
            after.setdefault(sequence[-2], []).append((np.array(sequence[:-1], np.int32), sequence[-1]))
    return BadWords(np.array([s[0] for s in sequences if len(s) == 1], np.int64), after)


@dataclass(frozen=True, slots=True)
class MinTokens:
    """``min_tokens``: excludes ``stops`` (int64 ids), which would end the request, below so many output tokens."""

    min_tokens: int
    stops: npt.NDArray[np.int64]

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        if token_ids.size - num_prompt_tokens < self.min_tokens:
            row[self.stops] = -np.inf


def make_min_tokens(request: NewRequestData) -> MinTokens | None:
    """The processor ``request`` needs, or None. Under ``ignore_eos`` an EOS id ends nothing, so it stays allowed."""
    params = request.sampling_params
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops.update(request.output.eos_token_ids)
    if params.min_tokens == 0 or not stops:
        return None
    return MinTokens(params.min_tokens, np.array(sorted(stops), np.int64))


@dataclass(frozen=True, slots=True)
class LogitBias:
    """``logit_bias`` (OpenAI's field): adds ``bias[i]`` (float32) to the logit of ``ids[i]`` (int64)."""

    ids: npt.NDArray[np.int64]
    bias: FloatArray

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        row[self.ids] += self.bias


def make_logit_bias(request: NewRequestData) -> LogitBias | None:
    """The processor ``request`` needs, or None."""
    bias = request.sampling_params.logit_bias
    if not bias:
        return None
    return LogitBias(np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, frequency and presence penalties, computed afresh from the request's tokens at every step.

    So there is no count that preemption, recomputation or a prefix-cache hit could leave wrong: the border between
    prompt and output is ``num_prompt_tokens``.

    ``repetition`` (CTRL, arXiv 1909.05858) covers prompt and output; the other two (OpenAI's) output only.

    repetition: a positive logit is divided by it, a negative one multiplied.
    frequency: ``logit -= frequency * count``;  presence: ``logit -= presence`` once.
    """

    repetition: float
    frequency: float
    presence: float

    def apply(self, row: FloatArray, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        if self.repetition != 1.0:
            # A token that occurs twice is read before it is written, so it is penalised once.
            seen = row[token_ids]
            factor = np.float32(self.repetition)
            row[token_ids] = np.where(seen > 0, seen / factor, seen * factor)
        output = token_ids[num_prompt_tokens:]
        if output.size == 0:
            return
        if self.frequency != 0.0:
            counts = np.bincount(output)
            row[: counts.size] -= np.float32(self.frequency) * counts.astype(np.float32)
        if self.presence != 0.0:
            row[output] = row[output] - np.float32(self.presence)


def make_penalties(request: NewRequestData) -> Penalties | None:
    """The processor ``request`` needs, or None."""
    params = request.sampling_params
    penalties = Penalties(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return None if penalties == Penalties(1.0, 0.0, 0.0) else penalties


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """``thinking_token_budget``: after so many tokens of thinking the next one is the tag that closes it.

    Where a grammar does not let it be the next one (within a character of several tokens, say), it is the first that
    may. Lifts ``end`` out of reach of all others once ``budget`` tokens follow ``start`` (None: the prompt)."""

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


def make_thinking_budget(request: NewRequestData) -> ThinkingBudget | None:
    """The processor ``request`` needs, or None."""
    params = request.sampling_params
    if params.thinking_token_budget is None or params.thinking is None:
        return None
    return ThinkingBudget(params.thinking_token_budget, params.thinking.start, params.thinking.end)


# The order is the meaning: a mask set early is respected by everything after it.
PROCESSORS: tuple[Callable[[NewRequestData], LogitsProcessor | None], ...] = (
    make_allowed_token_ids,
    make_bad_words,
    make_min_tokens,
    make_logit_bias,
    make_penalties,
    make_thinking_budget,
)
