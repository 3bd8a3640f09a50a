"""What a caller gets back for a request. Plain data; knows nothing of how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec

from octavo.messages import CacheMiss, RequestFacts, RequestFault


class Logprob(msgspec.Struct, gc=False):
    """One token at one position. ``rank`` is 1-based in the full vocabulary; ``logprob`` is finite.

    There may be millions, of numbers and texts alone: the garbage collector need not walk them.
    """

    logprob: float
    rank: int
    decoded_token: str


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """One entry a position, read as a dict of Logprob by token id (empty: the position has none), kept in flat lists.

    So the logprobs of a long answer are a few lists instead of an object a number; a request asks for it by
    ``flat_logprobs``. Position i is ``start_indices[i] .. end_indices[i] - 1`` of the other four lists.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(self, entries: Iterable[dict[int, Logprob] | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.decoded_tokens: list[str] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: dict[int, Logprob] | None) -> None:
        """Add the next position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, one in (entry or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(one.logprob)
            self.ranks.append(one.rank)
            self.decoded_tokens.append(one.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs(self[i] for i in range(*index.indices(len(self))))
        span = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in span}

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} numbers)"


PromptLogprobs = list[dict[int, Logprob] | None] | FlatLogprobs
"""By position; those that are not scored, the first at least, have none."""


@dataclass(slots=True)
class RequestMetrics:
    """Life of one sequence: ``facts`` as the core tells them, and what the front end saw of it.

    Times are on the ``time.monotonic()`` clock, in seconds; None: not reached.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    facts: RequestFacts = RequestFacts()

    @property
    def queued_time(self) -> float | None:
        return self.facts.queued_time

    @property
    def scheduled_time(self) -> float | None:
        """When it was scheduled for the first time."""
        return self.facts.scheduled_time

    @property
    def num_preemptions(self) -> int:
        return self.facts.num_preemptions


@dataclass(slots=True)
class CompletionOutput:
    """One of the n samples of a request.

    With ``RequestOutputKind.DELTA``, ``text``, ``token_ids`` and ``logprobs`` hold only what is new since the last
    output; ``cumulative_logprob`` always covers the whole sample (0.0 unless logprobs were asked for).
    ``finish_reason`` is None while running, then stop, length, repetition, abort or error. ``stop_reason`` is the stop
    string or stop token id that matched, None for EOS, and the message of an error, whose kind is ``fault``.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None  # per token: the sampled one first, then the top k by rank
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    fault: RequestFault | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state (or, with DELTA, the news) of one request. ``request_id`` is the caller's own.

    ``outputs`` is ordered by sample index; with CUMULATIVE and FINAL_ONLY it holds every sample that has begun, with
    DELTA only the samples with news. ``finished`` is true once all n samples have ended. ``prompt_logprobs`` has one
    entry per prompt token, the first None; with DELTA it comes once, in the first output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None

    @property
    def facts(self) -> RequestFacts:
        """What the core told of the sample with the latest news."""
        return RequestFacts() if self.metrics is None else self.metrics.facts

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that came from a cache."""
        return self.facts.num_cached_tokens

    @property
    def num_pinned_tokens(self) -> int:
        """Tokens of the prompt up to which its pins could be set."""
        return self.facts.num_pinned_tokens

    @property
    def cache_miss(self) -> CacheMiss | None:
        """Why no more of the prompt was found, if the request asked for that."""
        return self.facts.cache_miss
