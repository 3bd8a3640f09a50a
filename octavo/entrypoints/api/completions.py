"""POST /v1/completions: text or token ids in, their continuation out. Choice p*n+i is sample i of prompt p."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from octavo.entrypoints.api.shared.answers import (
    RenderedPrompts,
    RequestTimes,
    Usage,
    metrics_of,
    rendered,
    stream_usage,
    usage_of,
    wants_metrics,
)
from octavo.entrypoints.api.shared.errors import DONE, OPENAI, error_event
from octavo.entrypoints.api.shared.logprobs import CompletionLogprobs, completion_logprobs, join, prompt_logprobs
from octavo.entrypoints.api.shared.shapes import GenerationRequest, Prompt
from octavo.entrypoints.api.shared.translate import generation_options
from octavo.entrypoints.chat.generation import Generation, response_id
from octavo.entrypoints.chat.prompts import encode_prompts, output_budget, truncate
from octavo.entrypoints.chat.sampling import check_weight, sampling_params
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import encode_event, json_response, respond
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.messages import SamplingParams

router = APIRouter(route_class=JsonRoute)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
STREAM = "`data: Completion` an event, `data: [DONE]` at the end"
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"prompt_embeds": (), "suffix": ("",)}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Whole answers and chunks alike; a chunk has no usage unless asked for."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType | None = UNSET


API = Api(router, (Completion, RenderedPrompts), OPENAI)


@router.post("/v1/completions", response_class=Response, responses=describe_answer(Completion, stream=STREAM))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt, whole or as a stream of chunks."""
    answer = await _prepared(body, request)
    return await respond(request, answer.complete, answer.chunks, error_event, stream=bool(body.stream))


@router.post("/v1/completions/render", response_class=Response, responses=describe_answer(RenderedPrompts))
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """What POST /v1/completions would do with this body, prompt by prompt."""
    generation = (await _prepared(body, request)).generation
    pairs = zip(generation.prompts, generation.params, strict=True)
    return json_response(RenderedPrompts(data=[rendered(generation, ids, params) for ids, params in pairs]))


async def _prepared(body: CompletionRequest, request: Request) -> CompletionAnswer:
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.refuse(REFUSED_IN_COMPLETIONS))
    return CompletionAnswer(await prepare(context, model, body), context, body)


async def prepare(context: RequestContext, model: ServedModel, body: CompletionRequest) -> Generation:
    """Check everything and encode the prompts. Raises ValidationError or OverloadedError before an answer has begun."""
    engine = model.ready_engine()
    engine.check_queue(context.tenant)
    requested = body.max_tokens
    if requested is not None and (requested < 0 or (requested == 0 and not body.echo)):
        raise ValidationError(
            f"max_tokens must be at least 1 (0 only with echo), got {requested}", parameter="max_tokens"
        )
    limit = engine.info.max_model_len
    prompts = await encode_prompts(
        engine.tokenizer,
        body.prompt,
        n=max(body.n or 1, body.best_of or 1),
        add_special_tokens=body.add_special_tokens,
        limit=limit,
        fits=body.truncate_prompt_tokens is None,
    )
    default = model.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    keep, side = body.truncate_prompt_tokens, body.truncation_side
    prompts = [truncate(p, keep, requested or default, limit, side=side) for p in prompts]
    # with max_tokens 0 only the prompt is scored: one token is sampled and dropped
    wanted = 1 if requested == 0 else requested
    budgets = [
        output_budget(len(prompt), wanted, default, limit, prompt_field="prompt", field="max_tokens")
        for prompt in prompts
    ]
    options = generation_options(context, body)
    by_budget: dict[int, SamplingParams] = {}
    for budget in budgets:
        if budget not in by_budget:
            by_budget[budget] = sampling_params(
                options,
                model.sampling_defaults,
                max_tokens=budget,
                logprobs=body.logprobs,
                prompt_logprobs=_prompt_logprobs(body),
            )
            check_weight(by_budget[budget], len(prompts))
    params = [by_budget[budget] for budget in budgets]
    identity = response_id("cmpl-", context, options)
    return await Generation.begin(context, model, options, prompts, params, response_id=identity)


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many logprobs a prompt token gets: as many as ``echo`` shows and ``prompt_logprobs`` asks for; -1: all."""
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    asked = [count for count in counts if count is not None]
    if body.prompt_logprob_token_ids is not None:
        return body.prompt_logprobs  # these instead of a number, which must then agree
    return None if not asked else -1 if -1 in asked else max(asked)


class CompletionAnswer:
    """Turns the engine's outputs into choices. Keeps, per choice, where its text has got to (for ``text_offset``)."""

    def __init__(self, generation: Generation, context: RequestContext, body: CompletionRequest) -> None:
        self.generation, self.body = generation, body
        self._stream_usage, self._wants_metrics = stream_usage(context, body), wants_metrics(context, body)
        self.scoring_only = body.max_tokens == 0
        self.wants_logprobs = body.logprobs is not None or bool(body.logprob_token_ids)
        self._offsets: dict[int, int] = {}  # choice index -> offset in its text; a key means that it has begun

    async def complete(self) -> Completion:
        """The whole answer."""
        choices: dict[int, CompletionChoice] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for prompt_index, output in outputs:
                for sample in output.outputs:
                    work = functools.partial(self._choice, prompt_index, output, sample, finish=True)
                    many = sample.logprobs is not None or output.prompt_logprobs is not None
                    choice = await asyncio.to_thread(work) if many else work()
                    choices[choice.index] = choice
        whole = [choices[index] for index in sorted(choices)]
        return self._envelope(whole, self._usage(), self._metrics())

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: deltas, one finish_reason a choice, then usage if asked for, then [DONE]."""
        final_usage, running_usage = self._stream_usage
        async with aclosing(self.generation.outputs()) as outputs:
            async for prompt_index, output in outputs:
                for sample in output.outputs:
                    for choice in self._delta_choices(prompt_index, output, sample):
                        usage: Any = None if final_usage else UNSET
                        yield encode_event(self._envelope([choice], self._usage() if running_usage else usage))
        if final_usage:
            yield encode_event(self._envelope([], self._usage(), self._metrics()))
        yield DONE

    def _delta_choices(
        self, prompt_index: int, output: RequestOutput, sample: CompletionOutput
    ) -> list[CompletionChoice]:
        """At most two chunks: what is new, and the end."""
        chunks = []
        fresh = prompt_index * self.generation.n + sample.index not in self._offsets
        told = sample.token_ids and (self.wants_logprobs or self.body.return_token_ids)
        if sample.text or told or (fresh and self.body.echo):
            chunks.append(self._choice(prompt_index, output, sample, finish=False))
        if sample.finish_reason is not None:
            chunks.append(
                CompletionChoice(
                    index=prompt_index * self.generation.n + sample.index,
                    text="",
                    finish_reason=self._finish_reason(sample),
                    stop_reason=None if self.scoring_only else sample.stop_reason,
                )
            )
        return chunks

    def _finish_reason(self, sample: CompletionOutput) -> str | None:
        return "length" if self.scoring_only and sample.finish_reason == "stop" else sample.finish_reason

    def _choice(
        self, prompt_index: int, output: RequestOutput, sample: CompletionOutput, *, finish: bool
    ) -> CompletionChoice:
        """The news of ``sample``, with the prompt before it where echo asks for it and it has not been sent."""
        index = prompt_index * self.generation.n + sample.index
        fresh = index not in self._offsets
        prompt = self.generation.prompts[prompt_index]
        text, token_ids = ("", []) if self.scoring_only else (sample.text, sample.token_ids)
        logprobs = self._logprobs(index, output, sample, echo=fresh and bool(self.body.echo))
        if fresh and self.body.echo:
            text = self.generation.tokenizer.decode(prompt, skip_special_tokens=False) + text
        wants_ids = self.body.return_token_ids
        asked = self.body.prompt_logprobs is not None or self.body.prompt_logprob_token_ids is not None
        scored = output.prompt_logprobs if fresh and asked else None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(sample) if finish else None,
            stop_reason=sample.stop_reason if finish and not self.scoring_only else None,
            token_ids=token_ids if wants_ids else UNSET,
            prompt_token_ids=prompt if wants_ids and fresh else UNSET,
            prompt_logprobs=UNSET if scored is None else prompt_logprobs(scored),
        )

    def _logprobs(
        self, index: int, output: RequestOutput, sample: CompletionOutput, *, echo: bool
    ) -> CompletionLogprobs | None:
        offset = self._offsets.setdefault(index, 0)
        if not self.wants_logprobs:
            return None
        tokenizer, as_ids = self.generation.tokenizer, bool(self.body.return_tokens_as_token_ids)
        result = CompletionLogprobs([], [], [], [])
        if echo:
            prompt = self.generation.prompts[index // self.generation.n]
            entries = output.prompt_logprobs or [None] * len(prompt)
            result, offset = completion_logprobs(tokenizer, prompt, entries, offset, as_ids=as_ids)
        if not self.scoring_only:
            own, offset = completion_logprobs(tokenizer, sample.token_ids, sample.logprobs or [], offset, as_ids=as_ids)
            result = join(result, own)
        self._offsets[index] = offset
        return result

    def _usage(self) -> Usage:
        usage = usage_of(self.generation.counter)
        if not self.scoring_only:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def _metrics(self) -> RequestTimes | UnsetType | None:
        return metrics_of(self.generation, wanted=self._wants_metrics)

    def _envelope(self, choices: list[CompletionChoice], usage: Any, metrics: Any = UNSET) -> Completion:
        generation = self.generation
        return Completion(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            system_fingerprint=generation.system_fingerprint,
            usage=usage,
            metrics=metrics,
        )
