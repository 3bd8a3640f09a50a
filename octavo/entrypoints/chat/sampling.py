"""From a request's fields to SamplingParams: request > the server's defaults > OpenAI's. Ranges are checked there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.config.engine import MAX_SAMPLES
from octavo.entrypoints.chat.constraints import constraint
from octavo.exceptions import ValidationError
from octavo.messages import (
    BeamSearch,
    CacheOptions,
    ReportOptions,
    RequestOutputKind,
    SamplingParams,
    SchedulingOptions,
)

# fields of SamplingParams that a client sets by the same name
CLIENT_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "repetition_detection",
    "thinking_token_budget",
    "skip_reading_prefix_cache",
    "stream_interval",
)

MAX_LOGPROBS = 1 << 22  # of one request: half a gigabyte of objects
MAX_WEIGHT = 4 << 20  # bytes of sampling parameters: lists of ids and words, grammars, once for each sequence
SPELLINGS = 4  # times as large as a bad word is what becomes of it: ids, of two ways to spell it


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How prompts are to be continued, as the client put it; ranges are checked when it becomes SamplingParams.

    ``sampling`` has those of CLIENT_FIELDS that were given. ``max_tokens_field`` is what the client calls the limit.
    ``keep_prompt_tokens`` cuts a longer prompt at ``truncation_side``; -1 keeps what fits.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    use_beam_search: bool = False
    best_of: int | None = None  # the beams' number; n of them are returned
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    prompt_logprobs: int | None = None
    keep_prompt_tokens: int | None = None
    truncation_side: str | None = "left"
    stream: bool = False
    request_id: str | None = None  # the client's own
    scheduling: SchedulingOptions = SchedulingOptions()
    cache: CacheOptions = CacheOptions()
    report: ReportOptions = ReportOptions()


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Within, a ValidationError about one of ``names`` becomes one about the field that the client has for it."""
    try:
        yield
    except ValidationError as error:
        own = names.get(error.parameter or "")
        if own is None:
            raise
        message = str(error)
        if message.startswith(str(error.parameter)):
            message = own + message.removeprefix(str(error.parameter))
        raise ValidationError(message, parameter=own) from error


def check_weight(params: SamplingParams, num_prompts: int) -> None:
    """Each sequence of a request has lists and masks of its own: long lists and many sequences do not go together.

    Raises ValidationError naming what there is too much of.
    """
    sequences = num_prompts * min(params.n, MAX_SAMPLES)
    try:
        weight = len(msgspec.msgpack.encode(params)) + (SPELLINGS - 1) * sum(map(len, params.bad_words))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return  # what no message can carry is refused, by name, where the engine looks at it
    if sequences > 1 and weight * sequences > MAX_WEIGHT:
        field = "n" if params.n > 1 else "prompt"
        raise ValidationError(
            f"{field}: the sampling parameters have {weight} bytes (as msgpack) for each of {sequences} sequences; at "
            f"most {MAX_WEIGHT} bytes in all are allowed: shorten their lists, or ask for fewer sequences at once",
            parameter=field,
        )


def check_logprobs(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], vocab_size: int) -> None:
    """Raises ValidationError if all log-probabilities of a request may be more than one server should have to keep."""
    answers = scored = 0
    for ids, one in zip(prompts, params, strict=True):
        answers += one.n * (one.max_tokens or 0) * _entries(one.logprobs, one.logprob_token_ids, vocab_size)
        positions = max(0, len(ids) - 1 - one.prompt_logprob_start)
        scored += positions * _entries(one.prompt_logprobs, one.prompt_logprob_token_ids, vocab_size)
    if answers + scored > MAX_LOGPROBS:
        field = "logprobs" if answers >= scored else "prompt_logprobs"
        raise ValidationError(
            f"{field}: this request may come to {answers + scored} log-probabilities (of all tokens of its prompts and "
            f"samples, {scored} of them of prompts); at most {MAX_LOGPROBS} are allowed: ask for fewer of fewer tokens",
            parameter=field,
        )


def _entries(count: int | None, ids: Sequence[int] | None, vocab_size: int) -> int:
    """Log-probabilities of one token, its own among them."""
    if ids:
        return 1 + len(ids)
    return 0 if count is None else vocab_size if count == -1 else 1 + count


def beams(options: GenerationOptions) -> BeamSearch | None:
    """The beam search that is asked for. Raises ValidationError for options of one where none is."""
    n, width = max(options.sampling.get("n", 1), 1), options.best_of
    if not options.use_beam_search:
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
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        early_stopping=options.early_stopping or False,
    )


def sampling_params(
    options: GenerationOptions,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """SamplingParams of one prompt. Raises ValidationError naming the field that is out of range."""
    beam_search = beams(options)
    chosen = dict(options.sampling)
    if beam_search is None:  # the defaults say how to draw, and beams draw nothing
        chosen = {name: defaults[name] for name in CLIENT_FIELDS if name in defaults} | chosen
    with renamed({"extra_args": "vllm_xargs"}):
        return SamplingParams(
            **chosen,
            beam_search=beam_search,
            max_tokens=max_tokens,
            # chat's top_logprobs is 0 where it is not given: then the ids alone say how many
            logprobs=None if chosen.get("logprob_token_ids") and logprobs == 0 else logprobs,
            prompt_logprobs=prompt_logprobs,
            extra_args=options.extra_args,
            structured_outputs=constraint(options),
            output_kind=RequestOutputKind.DELTA if options.stream else RequestOutputKind.FINAL_ONLY,
        )
