"""What a caller gets back for a request. Plain data; knows nothing of how it was made."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token at one position. ``rank`` is 1-based in the full vocabulary; ``logprob`` is finite."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class RequestMetrics:
    """Life of one request on the ``time.monotonic()`` clock, in seconds; None: not reached."""

    arrival_time: float
    queued_time: float | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One of the n samples of a request.

    With ``RequestOutputKind.DELTA``, ``text``, ``token_ids`` and ``logprobs`` hold only what is new since the last
    output; ``cumulative_logprob`` always covers the whole sample (0.0 unless logprobs were asked for).
    ``finish_reason`` is None while running, then stop, length, abort or error. ``stop_reason`` is the stop string or
    stop token id that matched, None for EOS, and the message of an error.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the sampled one first, then the top k by rank
    finish_reason: str | None = None
    stop_reason: int | str | None = None

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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
