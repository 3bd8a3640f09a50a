"""What OpenAI's answers have in common: token counts, times, rendered prompts, and how they come of a generation.

Answers are msgspec structs: cheap to make and to encode, which counts once per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.entrypoints.api.shared.shapes import GenerationRequest
from octavo.entrypoints.chat.generation import CacheReport, Generation, UsageCounter
from octavo.entrypoints.server.context import RequestContext

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestMetrics
    from octavo.messages import SamplingParams


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_report: CacheReport | UnsetType = UNSET  # on request


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """``completion_tokens_details`` is there for models that can think."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class RequestTimes(msgspec.Struct, frozen=True):
    """vLLM's per-request metrics: milliseconds, and output tokens per second of generation. None: not reached.

    ``time_to_first_token_ms`` counts from arrival, ``generation_time_ms`` from the first token to the last,
    ``queue_time_ms`` until the first scheduling; ``mean_itl_ms`` is the mean time between two tokens.
    """

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would have the model continue, and how. ``sampling_params`` has all values in force."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any]


class RenderedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """One for each prompt of a completions request."""

    object: str = "list"
    data: list[RenderedPrompt]


def usage_of(counter: UsageCounter) -> Usage:
    """The token counts so far."""
    report = UNSET if counter.cache_report is None else counter.cache_report
    thinking = UNSET if counter.reasoning_tokens is None else CompletionTokensDetails(counter.reasoning_tokens)
    prompt, completion = counter.prompt_tokens, counter.completion_tokens
    details = PromptTokensDetails(counter.cached_tokens, report)
    return Usage(prompt, completion, prompt + completion, details, thinking)


def metrics_of(generation: Generation, *, wanted: bool) -> RequestTimes | UnsetType | None:
    """The times for the answer's body where they are ``wanted``; None for more than one sequence."""
    if not wanted:
        return UNSET
    if generation.times is None or generation.n > 1:
        return None
    return _request_times(generation.times, generation.counter.completion_tokens)


def _request_times(times: RequestMetrics, num_tokens: int) -> RequestTimes:
    """The body's metrics of one sequence with ``num_tokens`` output tokens."""

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else 1000 * (end - start)

    spent = between(times.first_token_time, times.last_token_time)
    gaps = num_tokens - 1
    return RequestTimes(
        time_to_first_token_ms=between(times.arrival_time, times.first_token_time),
        generation_time_ms=spent,
        queue_time_ms=between(times.queued_time, times.scheduled_time),
        mean_itl_ms=spent / gaps if spent is not None and gaps > 0 else None,
        tokens_per_second=1000 * gaps / spent if spent and gaps > 0 else None,
    )


def wants_metrics(context: RequestContext, body: GenerationRequest) -> bool:
    """Whether the answer has a member ``metrics``."""
    return bool(body.return_metrics) or context.server.config.enable_per_request_metrics


def stream_usage(context: RequestContext, body: GenerationRequest) -> tuple[bool, bool]:
    """(a usage chunk at the end, usage in every chunk). Metrics come with the last chunk, so they ask for it."""
    options = body.stream_options
    asked = wants_metrics(context, body) or bool(body.return_cache_report)
    forced = context.server.config.enable_force_include_usage or asked
    running = bool(options and options.include_usage and options.continuous_usage_stats)
    return forced or bool(options and options.include_usage), running


def rendered(generation: Generation, token_ids: list[int], params: SamplingParams) -> RenderedPrompt:
    """One prompt of ``generation``, and its parameters."""
    values = msgspec.structs.asdict(params)
    del values["output_kind"]  # how the engine talks to this server
    prompt = generation.tokenizer.decode(token_ids, skip_special_tokens=False)
    return RenderedPrompt(
        request_id=generation.id, model=generation.model, prompt=prompt, token_ids=token_ids, sampling_params=values
    )
