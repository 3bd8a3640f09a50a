"""From a request's fields to SamplingParams: request > the server's defaults > OpenAI's. Ranges are checked there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.entrypoints.openai.constraints import constraint
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.exceptions import ValidationError
from octavo.messages import BeamSearch, RequestOutputKind, SamplingParams

PASSED_ON = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias"),
    *("allowed_token_ids", "bad_words", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("skip_special_tokens", "spaces_between_special_tokens", "repetition_detection", "thinking_token_budget"),
    *("skip_reading_prefix_cache", "stream_interval"),
)


def beams(request: GenerationRequest) -> BeamSearch | None:
    """The beam search that is asked for. Raises ValidationError for options of one where none is."""
    n, width = max(request.n or 1, 1), request.best_of
    if not request.use_beam_search:
        if width not in (None, 1, n):
            raise ValidationError(
                f"best_of = {width} is only allowed with use_beam_search; ask for n samples and choose among them",
                parameter="best_of",
                value=width,
            )
        return None
    if width is not None and width < n:
        raise ValidationError(f"best_of must be at least n ({n}), got {width}", parameter="best_of", value=width)
    return BeamSearch(
        beam_width=n if width is None else width,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
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
    chosen: dict[str, Any] = {"beam_search": beams(request)}
    if chosen["beam_search"] is not None:
        defaults = {}  # they say how to draw, and nothing is drawn
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
