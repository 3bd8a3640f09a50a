"""Messages between the front end (API process) and the engine core."""

from __future__ import annotations

import enum

import msgspec

from octavo.messages.cache import CacheMiss
from octavo.messages.fault import RequestFault
from octavo.messages.kv_transfer import KVTierStats
from octavo.messages.request_options import CacheOptions, OutputOptions, ReportOptions, SchedulingOptions
from octavo.messages.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words plus ``abort``, ``error`` and ``repetition`` (vLLM's)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue ``n`` times. ``request_id`` is internal and unique for ever (never the client's own id)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float  # time.monotonic() seconds, comparable across processes of one machine
    sample_index: int = 0  # which of the n samples of one user request this is; part of the random key
    scheduling: SchedulingOptions = SchedulingOptions()
    cache: CacheOptions = CacheOptions()
    output: OutputOptions = OutputOptions()
    report: ReportOptions = ReportOptions()

    @property
    def deadline(self) -> float | None:
        """``time.monotonic()`` seconds, after which the request is not worth starting; None: it always is."""
        timeout = self.scheduling.timeout
        return None if timeout is None else self.arrival_time + timeout

    @property
    def output_ids(self) -> list[str]:
        """Ids under which outputs come: one for each of the ``n`` sequences."""
        n = self.sampling_params.n
        return [self.request_id] if n == 1 else [f"{self.request_id}.{index}" for index in range(n)]

    def samples(self) -> list[EngineCoreRequest]:
        """The ``n`` sequences asked for, by sample index. Prompt logprobs are wanted of the first one only.

        With n = 1 that is the request itself, else sample i has the id ``<request_id>.<i>``.
        """
        n = self.sampling_params.n
        if n == 1:
            return [self]
        first = self.sampling_params.replace(n=1)
        rest = first
        if first.wants_prompt_logprobs:
            rest = first.replace(prompt_logprobs=None, prompt_logprob_token_ids=None)
        return [
            msgspec.structs.replace(self, request_id=output_id, sampling_params=rest if i else first, sample_index=i)
            for i, output_id in enumerate(self.output_ids)
        ]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: entry 0 is the sampled (or prompt) token itself, then the top k by rank (or
    the ids that were asked for).

    ``ranks`` are 1-based ranks in the full vocabulary. All values are finite; in a logits mode they are logits.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine core knows of one sequence beside its tokens. It travels whole from the core to the API.

    Times are monotonic seconds; None: not reached.
    """

    queued_time: float | None = None
    scheduled_time: float | None = None  # for the first time
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from a cache;
    num_external_tokens: int = 0  # of these, from a tier behind the block pool
    num_pinned_tokens: int = 0  # of the prompt, up to which its pins could be set
    cache_miss: CacheMiss | None = None  # why no more of the prompt was found, of a request that asked


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one request. ``request_id`` is one of the ``output_ids``, never the caller's name for it."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None  # one per new token, if asked for
    new_prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's scored positions, as they are computed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id that matched, or what repetition is called; None for EOS
    error: RequestFault | None = None  # set with finish_reason ERROR
    facts: RequestFacts | None = None  # on the first output of a sequence, and on the next one after they changed


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of one step; the ``*_delta`` fields count since the previous message."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # referenced blocks / usable blocks, 0..1
    kv_cache_pinned: float = 0.0  # of these, those that pins hold
    num_blocks: int = 0
    prefix_cache_queries_delta: int = 0  # tokens
    prefix_cache_hits_delta: int = 0  # tokens, in the block pool
    external_prefix_cache_queries_delta: int = 0  # tokens that were not there
    external_prefix_cache_hits_delta: int = 0  # of these, found in a tier behind it
    kv_tiers: dict[str, KVTierStats] = {}
    num_preemptions_delta: int = 0
    iteration_tokens: int = 0  # tokens computed in this step
    step_seconds: float = 0.0
    num_deferred: int = 0  # of the waiting, found to lack something of their own (a grammar) when last looked at
    num_drafts_delta: int = 0  # times that drafts of a request were tried
    num_draft_tokens_delta: int = 0
    accepted_per_position_delta: list[int] = []  # [i]: drafts whose token i (from 0) was right, and all before it
    admitted_ids: list[str] = []  # requests that left the queue for the first time, since the previous message


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All outputs of one step."""

    outputs: list[EngineCoreOutput] = []
    timestamp: float = 0.0  # monotonic seconds at the end of the step
    stats: SchedulerStats | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine core tells the front end once it is ready."""

    max_model_len: int
    vocab_size: int  # width of the logits
    num_blocks: int  # including the null block
    block_size: int
    num_kv_groups: int = 1  # a token takes a slot in a block of each group
    kv_cache_bytes: int
    phases: list[tuple[str, float]] = []  # start-up phases and their seconds, in order
    facts: dict[str, str] = {}  # kernels' ISA, threads, weights format and bytes
