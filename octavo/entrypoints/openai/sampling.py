"""From a request's fields to SamplingParams: request > generation_config.json > OpenAI's default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.exceptions import ValidationError
from octavo.messages import RequestOutputKind, SamplingParams

MAX_LOGIT_BIAS = 100.0
PASSED_ON = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    "allowed_token_ids",
)


def parse_logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """Token id -> bias, clamped to [-100, 100] as vLLM does. Keys come as strings in JSON; a bad one is named."""
    if given is None:
        return None
    biases = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ValidationError(f"logit_bias: {key!r} is not a token id", parameter="logit_bias", value=key)
        if not math.isfinite(bias):
            raise ValidationError(f"logit_bias: the bias of {key} must be finite", parameter="logit_bias", value=key)
        biases[int(key)] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))
    return biases


def sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, float],
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
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return SamplingParams(
        **chosen,
        stop=stop,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=parse_logit_bias(request.logit_bias),
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )
