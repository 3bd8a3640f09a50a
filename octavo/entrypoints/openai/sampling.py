"""From a request's fields to SamplingParams: request > the server's defaults > OpenAI's. Ranges are checked there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.entrypoints.openai.constraints import constraint
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.messages import RequestOutputKind, SamplingParams

PASSED_ON = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias"),
    *("allowed_token_ids", "bad_words", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("skip_special_tokens", "spaces_between_special_tokens", "repetition_detection", "thinking_token_budget"),
    *("skip_reading_prefix_cache", "stream_interval"),
)


def sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """SamplingParams of one prompt. Raises ValidationError naming the field that is out of range."""
    chosen: dict[str, Any] = {}
    for name in PASSED_ON:
        value = getattr(request, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            chosen[name] = value
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        # chat's top_logprobs is 0 where it is not given: then the ids alone say how many
        logprobs=None if request.logprob_token_ids and logprobs == 0 else logprobs,
        prompt_logprobs=prompt_logprobs,
        extra_args=request.vllm_xargs,
        structured_outputs=constraint(request),
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )
