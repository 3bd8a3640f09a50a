"""What completions and chat share once their prompts are token ids: run them, merge their outputs, count tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from octavo.entrypoints.openai.answers import (
    CacheReport,
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestTimes,
    Usage,
)
from octavo.entrypoints.openai.constraints import named_by
from octavo.entrypoints.openai.prompt_map import cache_report
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.openai.sampling import check_logprobs
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError
from octavo.messages import CacheOptions, SchedulingOptions, Tenant

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestMetrics, RequestOutput
    from octavo.messages import CacheMiss, CachePin, CacheUse, SamplingParams


async def merge(streams: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[tuple[int, Any], None]:
    """(index of the stream, item) as they come. Closing it closes every stream; an exception in one ends all.

    At most one item of each stream waits here: whoever reads slowly leaves the rest where streams merge it.
    """
    queue: asyncio.Queue[tuple[int, Any, BaseException | None] | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncIterator[Any]) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for item in stream:
                    await queue.put((index, item, None))
        except Exception as caught:
            error = caught
        await queue.put((index, None, error) if error else None)

    tasks = [asyncio.ensure_future(pump(i, s)) for i, s in enumerate(streams)]
    try:
        ended = 0
        while ended < len(tasks):
            entry = await queue.get()
            if entry is None:
                ended += 1
                continue
            index, item, error = entry
            if error is not None:
                raise error
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class UsageCounter:
    """Tokens of one HTTP request: each prompt once, completions over all children."""

    prompt_lengths: list[int]
    completion_tokens: int = 0
    cache_use: dict[int, CacheUse] = field(default_factory=dict)  # by prompt index
    cache_report: CacheReport | UnsetType = UNSET
    reasoning_tokens: int | None = None  # over all children that have ended; None where the model cannot think

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count ``output``, whose token ids are new ones."""
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.cache_use[prompt_index] = output.cache_use

    @property
    def num_pinned_tokens(self) -> int:
        """Up to which the first prompt's pins could be set."""
        return self.cache_use[0].num_pinned_tokens if 0 in self.cache_use else 0

    def usage(self) -> Usage:
        prompt = sum(self.prompt_lengths)
        details = PromptTokensDetails(sum(use.num_cached_tokens for use in self.cache_use.values()), self.cache_report)
        thinking = UNSET if self.reasoning_tokens is None else CompletionTokensDetails(self.reasoning_tokens)
        return Usage(prompt, self.completion_tokens, prompt + self.completion_tokens, details, thinking)


def request_times(times: RequestMetrics, num_tokens: int) -> RequestTimes:
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


def scheduling_options(context: RequestContext, request: GenerationRequest) -> SchedulingOptions:
    """What body and headers say of the request's urgency, and whose it is."""
    tenant, timeout = Tenant(context.tenant), context.shortest_timeout(request.timeout)
    return SchedulingOptions(priority=request.priority, tenant=tenant, timeout=timeout)


def cache_options(request: GenerationRequest, pins: Sequence[CachePin]) -> CacheOptions:
    """What the body says of the prefix cache; ``pins``: its breakpoints, in tokens."""
    report = bool(request.return_cache_report)
    return CacheOptions(salt=request.cache_salt, pins=tuple(pins), wants_report=report)


class Generation:
    """The prompts of one HTTP request on their way through the engine.

    Construction lets the engine check every prompt, so ValidationError and OverloadedError come before an answer has
    begun; nothing is computed until :meth:`outputs` is iterated. While it is, DELETE /v1/requests can abort it by
    ``response_id``, or by an id that the client brought.
    """

    def __init__(
        self,
        context: RequestContext,
        model: ServedModel,
        request: GenerationRequest,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        response_id: str,
        cache_pins: Sequence[CachePin] = (),
        explain: Callable[[CacheMiss], CacheReport] = cache_report,
    ) -> None:
        """``explain`` may take its time: it is called in a thread of its own, if the report was asked for."""
        if request.return_cache_report and len(prompts) > 1:
            raise ValidationError("return_cache_report needs a single prompt", parameter="return_cache_report")
        self._context, self._engine = context, model.ready_engine()
        scheduling, explicit = scheduling_options(context, request), request.names_max_tokens
        params = [self._engine.bound(one, scheduling, explicit=explicit) for one in params]
        check_logprobs(prompts, params, self._engine.info.vocab_size)
        self.request, self.prompts, self.params = request, prompts, params
        self.tokenizer = self._engine.tokenizer
        self.id, self.model, self.created = response_id, model.name, int(time.time())
        self.system_fingerprint = model.system_fingerprint
        self.n = params[0].n
        self.counter = UsageCounter([len(prompt) for prompt in prompts])
        self.cache, self._explain = cache_options(request, cache_pins), explain
        self._times: RequestMetrics | None = None
        # what the client chose may repeat, what the engine is told must not: an abort is for this one alone
        self._engine_id = f"{response_id}-{uuid.uuid4().hex[:12]}"
        places = self._engine.reserve(prompts, params, scheduling)
        more: dict[str, Any] = {"scheduling": scheduling, "cache": self.cache, "arrival_time": context.arrival_time}
        self._streams = [
            self._engine.generate(prompt, one, request_id=self._engine_id, place=place, **more)
            for prompt, one, place in zip(prompts, params, places, strict=True)
        ]
        self._log = context.server.request_log.begin(self.id, prompts, params, self.tokenizer)

    @classmethod
    async def begin(
        cls,
        context: RequestContext,
        model: ServedModel,
        request: GenerationRequest,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        response_id: str,
        **more: Any,
    ) -> Generation:
        """The generation, once what constrains its text has been compiled, which never holds up the event loop."""
        with named_by(request):
            await model.ready_engine().check_constraint(params[0])  # all prompts of a request share it
            return cls(context, model, request, prompts, params, response_id=response_id, **more)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) as they come; closing it aborts what still runs. Raises RequestError if one fails."""
        tracked = self._context.server.running.track(self._ids, self._abort, self._context.caller)
        with tracked, contextlib.closing(self._log):
            if len(self._streams) == 1:  # the usual case, once per token: straight through
                async with aclosing(self._streams[0]) as stream:
                    async for output in stream:
                        self.counter.add(0, output)
                        self._log.add(0, output)
                        self._times = output.metrics
                        if output.cache_use.miss is not None and self.counter.cache_report is UNSET:
                            self.counter.cache_report = await asyncio.to_thread(self._explain, output.cache_use.miss)
                        yield 0, output
                return
            async with aclosing(merge(self._streams)) as merged:
                async for index, output in merged:
                    self.counter.add(index, output)
                    self._log.add(index, output)
                    yield index, output

    @property
    def _ids(self) -> set[str]:
        """What the client may call this answer."""
        return {self.id} | {name for name in (self.request.request_id, self._context.request_id) if name is not None}

    async def _abort(self) -> None:
        await self._engine.abort(self._engine_id)

    @property
    def wants_metrics(self) -> bool:
        return bool(self.request.return_metrics) or self._context.server.config.enable_per_request_metrics

    def metrics(self) -> RequestTimes | UnsetType | None:
        """The times for the answer's body where they were asked for; None for more than one sequence."""
        if not self.wants_metrics:
            return UNSET
        if self._times is None or self.n > 1:
            return None
        return request_times(self._times, self.counter.completion_tokens)

    @property
    def stream_usage(self) -> tuple[bool, bool]:
        """(a usage chunk at the end, usage in every chunk). Metrics come with the last chunk, so they ask for it."""
        options = self.request.stream_options
        asked = self.wants_metrics or bool(self.request.return_cache_report)
        forced = self._context.server.config.enable_force_include_usage or asked
        running = bool(options and options.include_usage and options.continuous_usage_stats)
        return forced or bool(options and options.include_usage), running


def response_id(prefix: str, context: RequestContext, request: GenerationRequest) -> str:
    """The client's own id, from body or header, is only echoed; inside, every request gets a fresh one."""
    return f"{prefix}{request.request_id or context.request_id or uuid.uuid4().hex}"
