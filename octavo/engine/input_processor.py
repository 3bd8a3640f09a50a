"""From a caller's prompt to an EngineCoreRequest: all that depends on the model is checked here, before admission.

Knows nothing of chat, HTTP or running requests.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.config import EngineConfig
from octavo.exceptions import ValidationError
from octavo.messages import (
    CacheOptions,
    EngineCoreRequest,
    EngineInfo,
    OutputOptions,
    ReportOptions,
    SamplingParams,
    SchedulingOptions,
)
from octavo.structured_output.checker import GrammarChecker
from octavo.tokenizer.base import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")
ABSENT = {"prompt_embeds": "prompt embeddings", "multi_modal_data": "images, audio and video"}
MAX_CACHE_SALT = 1024  # characters
MAX_PRIORITY = 2**31 - 1  # either way
_MASK64 = 2**64 - 1


class ParsedPrompt(NamedTuple):
    """``prompt`` is what is to be continued; ``text`` what RequestOutput.prompt says."""

    prompt: str | Sequence[int]
    text: str | None
    cache_salt: str | None


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` (which comes first), and ``cache_salt``.

    Raises ValidationError for other keys, and naming the feature where octavo lacks it.
    """
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(prompt, prompt if isinstance(prompt, str) else None, None)
    given = {key: value for key, value in prompt.items() if value is not None}
    for key, what in ABSENT.items():
        if key in given:
            raise ValidationError(f"{key}: octavo takes no {what}, only text and token ids", parameter=key)
    if set(given) - set(KEYS) or not {"prompt", "prompt_token_ids"} & set(given):
        raise ValidationError(
            f"a prompt dict has prompt or prompt_token_ids, and perhaps cache_salt; got {sorted(map(str, prompt))}",
            parameter="prompt",
        )
    text = given.get("prompt")
    if text is not None and not isinstance(text, str):
        raise ValidationError("the prompt of a prompt dict must be text", parameter="prompt")
    wanted: Any = given.get("prompt_token_ids", text)
    return ParsedPrompt(wanted, text, given.get("cache_salt"))


def derive_seed(config_seed: int, counter: int) -> int:
    """Seed of the ``counter``-th request when it brings none: SplitMix64 of the two, in [0, 2^63).

    So a fresh engine with the same ``--seed`` answers the same sequence of requests alike, and no two requests of
    one engine share a random stream. The n samples of a request differ by ``sample_index``, not by seed.
    """
    z = (config_seed * 0x9E3779B97F4A7C15 + (counter + 1) * 0xD1342543DE82EF95) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


class InputProcessor:
    """Validates and completes requests. Not thread-safe: one counter numbers all requests."""

    def __init__(
        self, tokenizer: Tokenizer, info: EngineInfo, config: EngineConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._info = info
        self._seed = config.model.seed
        self._limits = config.sampling
        chunked, most = config.scheduler.enable_chunked_prefill, config.scheduler.step_tokens
        self._step_tokens = None if chunked else most
        self._counter = itertools.count()
        self._spellings = functools.lru_cache(maxsize=8)(self._spell)  # all prompts of a request bar the same words
        self.grammars = GrammarChecker(config.structured_outputs, tokenizer, info.vocab_size)

    def process(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        scheduling: SchedulingOptions = SchedulingOptions(),
        cache: CacheOptions = CacheOptions(),
        report: ReportOptions = ReportOptions(),
        arrival_time: float | None = None,
    ) -> EngineCoreRequest:
        """The request, with an id that is unique in this engine, a seed, and ``max_tokens`` filled in.

        Text is tokenised with special tokens. Raises ValidationError naming the field at fault. A constraint that was
        not checked before (``grammars.check``, from any thread) is checked here, which may take seconds.
        """
        arrival_time = self._clock() if arrival_time is None else arrival_time
        if not isinstance(params, SamplingParams):
            raise ValidationError("sampling_params must be SamplingParams", parameter="sampling_params")
        params.verify(vocab_size=self._info.vocab_size, limits=self._limits)
        if params.thinking_token_budget is not None and params.thinking is None:
            raise ValidationError(
                "thinking_token_budget needs a model that is known to end its thinking with a token of its own",
                parameter="thinking_token_budget",
            )
        cache_salt, priority = cache.salt, scheduling.priority
        if cache_salt is not None and not (isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_CACHE_SALT):
            got = f"{len(cache_salt)}" if isinstance(cache_salt, str) else type(cache_salt).__name__
            raise ValidationError(
                f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {got}", parameter="cache_salt"
            )
        if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ValidationError(
                f"priority must be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {str(priority)[:40]}",
                parameter="priority",
                value=priority,
            )
        token_ids = self._token_ids(prompt)
        max_tokens = self._check_length(len(token_ids), params.max_tokens)
        bad_words = self._bad_words(params)
        constraint = params.structured_outputs
        grammar = None if constraint is None else self.grammars.check(constraint)
        self._check_beams(params)
        number = next(self._counter)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        return EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=token_ids,
            sampling_params=self._complete(params, max_tokens, seed),
            arrival_time=arrival_time,
            scheduling=scheduling,
            cache=cache,
            report=report,
            output=OutputOptions(
                eos_token_ids=self._tokenizer.eos_token_ids, bad_words_token_ids=bad_words, grammar=grammar
            ),
        )

    def _complete(self, params: SamplingParams, max_tokens: int, seed: int) -> SamplingParams:
        if params.min_tokens > max_tokens:
            raise ValidationError(
                f"min_tokens must be at most {max_tokens}, the room left in the context, got {params.min_tokens}",
                parameter="min_tokens",
                value=params.min_tokens,
            )
        top_k = min(params.top_k, self._info.vocab_size)  # more is no more, and need not fit a machine word
        params = params.replace(max_tokens=max_tokens, seed=seed, top_k=top_k, extra_args=None)
        if params.structured_outputs is None:
            return params
        # it travels as a grammar, whose end is the request's
        return params.replace(structured_outputs=None, ignore_eos=False)

    def _check_beams(self, params: SamplingParams) -> None:
        """Beams need log-probabilities, and so many continuations that some are left if all others end."""
        if params.beam_search is None:
            return
        if self._limits.logprobs_mode != "raw_logprobs":
            mode = self._limits.logprobs_mode
            raise ValidationError(
                f"beam search needs --logprobs-mode raw_logprobs, and this server has {mode}", parameter="beam_search"
            )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._tokenizer.eos_token_ids)}
        width, most = params.beam_search.beam_width, self._info.vocab_size // max(2, 1 + len(ends))
        if width > most:
            raise ValidationError(
                f"beam_width must be at most {most}, for the model has {self._info.vocab_size} tokens and "
                f"{len(ends)} of them end a text; got {width} (over HTTP it is best_of, or n)",
                parameter="beam_width",
                value=width,
            )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as token ids, as it begins a text and as it follows a space.

        Raises ValidationError where these and ``min_tokens`` leave none of the request's ``allowed_token_ids``.
        """
        found = self._spellings(tuple(params.bad_words))
        if params.allowed_token_ids is not None:
            barred = {ids[0] for ids in found if len(ids) == 1}
            if params.min_tokens > 0:
                barred |= {*params.stop_token_ids, *(() if params.ignore_eos else self._tokenizer.eos_token_ids)}
            if barred.issuperset(params.allowed_token_ids):
                raise ValidationError(
                    "allowed_token_ids must allow a token that bad_words and min_tokens (which bars the ids that end "
                    "a text) do not bar",
                    parameter="allowed_token_ids",
                )
        return [list(ids) for ids in found]

    def _spell(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for text in (bare, f" {bare}") if bare else (word,):
                if ids := self._tokenizer.encode(text, add_special_tokens=False):
                    found[tuple(ids)] = None
        return list(found)

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = list(self._tokenizer.encode(prompt))
        else:
            try:
                token_ids = [operator.index(token_id) for token_id in prompt]
            except TypeError:
                raise ValidationError("prompt must be text or a list of token ids", parameter="prompt") from None
        if not token_ids:
            if self._tokenizer.bos_token_id is None:
                raise ValidationError(
                    "prompt is empty, and the model has no BOS token to begin with", parameter="prompt"
                )
            return [self._tokenizer.bos_token_id]
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._info.vocab_size:
            worst = low if low < 0 else high
            raise ValidationError(
                f"prompt has the token id {worst}; the model's ids are in [0, {self._info.vocab_size - 1}]",
                parameter="prompt",
                value=worst,
            )
        return token_ids

    def _check_length(self, num_prompt: int, max_tokens: int | None) -> int:
        """The number of tokens that may be generated: ``max_tokens``, or the rest of the context for None."""
        limit = self._info.max_model_len
        if num_prompt >= limit:
            raise ValidationError(
                f"This model's maximum context length is {limit} tokens, but the prompt alone has {num_prompt} tokens "
                f"and at least 1 must be left for the output. Please shorten the prompt.",
                parameter="prompt",
                value=num_prompt,
            )
        if self._step_tokens is not None and num_prompt > self._step_tokens:
            raise ValidationError(
                f"The prompt has {num_prompt} tokens, but without chunked prefill a step computes at most "
                f"{self._step_tokens} (max_num_batched_tokens).",
                parameter="prompt",
                value=num_prompt,
            )
        if max_tokens is None:
            return limit - num_prompt
        if num_prompt + max_tokens > limit:
            raise ValidationError(
                f"This model's maximum context length is {limit} tokens, but {num_prompt + max_tokens} were requested: "
                f"{num_prompt} in the prompt and {max_tokens} for the output (max_tokens). Please reduce either.",
                parameter="max_tokens",
                value=max_tokens,
            )
        return max_tokens
