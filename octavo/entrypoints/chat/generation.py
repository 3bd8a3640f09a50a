"""Prompts on their way through the engine, whatever they came of: run them, merge their outputs, count tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.entrypoints.chat.constraints import named_by
from octavo.entrypoints.chat.sampling import GenerationOptions, check_logprobs
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestMetrics, RequestOutput
    from octavo.messages import CacheMiss, RequestFacts, SamplingParams


async def merge(streams: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[tuple[int, Any], None]:
    """(index of the stream, item) as they come. Closing it closes every stream; an exception in one ends all.

    At most one item of each stream waits here: a slow reader leaves the rest where streams merge it.
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


class CacheReport(msgspec.Struct, frozen=True):
    """Why no more of the prompt came from the cache: ``reason`` is differs, ends, new, complete or off.

    ``token`` is where, counted from 0; ``message`` the message that it is in, of a conversation.
    """

    reason: str
    cached_tokens: int
    token: int | None
    message: str | None
    detail: str


def cache_report(miss: CacheMiss, message: str | None) -> CacheReport:
    """``miss`` in words; ``message`` is the name of the one that it is in."""
    where = f"token {miss.position}" + (f" ({message})" if message is not None else "")
    detail = {
        "complete": "all whole blocks that can be reused were",
        "differs": f"differs from a cached prompt at {where}",
        "ends": f"nothing cached goes on from {where}",
        "new": "no cached prompt begins like this one",
        "off": "the request reads nothing from the cache",
    }[miss.kind]
    position = miss.position if miss.kind in ("differs", "ends") else None
    return CacheReport(miss.kind, miss.num_found, position, message, detail)


@dataclass
class UsageCounter:
    """Tokens of one request: each prompt once, completions over all children."""

    prompt_lengths: list[int]
    completion_tokens: int = 0
    facts: dict[int, RequestFacts] = field(default_factory=dict)  # by prompt index
    cache_report: CacheReport | None = None  # on request
    reasoning_tokens: int | None = None  # over all children that have ended; None where the model cannot think

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count ``output``, whose token ids are new ones."""
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.facts[prompt_index] = output.facts

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, taken from a cache."""
        return sum(facts.num_cached_tokens for facts in self.facts.values())

    @property
    def num_pinned_tokens(self) -> int:
        """Up to which the first prompt's pins could be set."""
        return self.facts[0].num_pinned_tokens if 0 in self.facts else 0


class Generation:
    """The prompts of one request on their way through the engine.

    Construction lets the engine check every prompt, so ValidationError and OverloadedError come before an answer has
    begun; nothing is computed until :meth:`outputs` is iterated. While it is, the server's RunningAnswers can abort it
    by ``response_id``, or by an id that the client brought. ``times`` are those of a single prompt, so far.
    """

    def __init__(
        self,
        context: RequestContext,
        model: ServedModel,
        options: GenerationOptions,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        response_id: str,
        message_of: Callable[[CacheMiss], str | None] = lambda miss: None,
    ) -> None:
        """``message_of`` names the message that a cache miss is in; it is called in a thread of its own, on request."""
        self.cache = options.cache
        if options.report.cache_miss and len(prompts) > 1:
            raise ValidationError("return_cache_report needs a single prompt", parameter="return_cache_report")
        self._context, self._engine, self._client_id = context, model.ready_engine(), options.request_id
        scheduling, explicit = options.scheduling, options.max_tokens is not None
        params = [self._engine.bound(one, scheduling, explicit=explicit) for one in params]
        check_logprobs(prompts, params, self._engine.info.vocab_size)
        self.prompts, self.params, self.tokenizer = prompts, params, self._engine.tokenizer
        self.id, self.model, self.created = response_id, model.name, int(time.time())
        self.system_fingerprint = model.system_fingerprint
        self.n = params[0].n
        self.counter = UsageCounter([len(prompt) for prompt in prompts])
        self.times: RequestMetrics | None = None
        self._message_of = message_of
        # what the client chose may repeat, what the engine is told must not: an abort is for this one alone
        self._engine_id = f"{response_id}-{uuid.uuid4().hex[:12]}"
        places = self._engine.reserve(prompts, params, scheduling)
        more: dict[str, Any] = {"scheduling": scheduling, "cache": options.cache, "report": options.report}
        self._streams = [
            self._engine.generate(
                prompt, one, request_id=self._engine_id, place=place, arrival_time=context.arrival_time, **more
            )
            for prompt, one, place in zip(prompts, params, places, strict=True)
        ]
        self._log = context.server.request_log.begin(self.id, prompts, params, self.tokenizer)

    @classmethod
    async def begin(
        cls,
        context: RequestContext,
        model: ServedModel,
        options: GenerationOptions,
        prompts: list[list[int]],
        params: list[SamplingParams],
        **more: Any,
    ) -> Generation:
        """The generation, once what constrains its text has been compiled, which never holds up the event loop."""
        with named_by(options):
            await model.ready_engine().check_constraint(params[0])  # all prompts of a request share it
            return cls(context, model, options, prompts, params, **more)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) as they come; closing it aborts what still runs. Raises RequestError if one fails."""
        tracked = self._context.server.running.track(self._ids, self._abort, self._context.caller)
        with tracked, contextlib.closing(self._log):
            if len(self._streams) == 1:  # the usual case, once per token: straight through
                async with aclosing(self._streams[0]) as stream:
                    async for output in stream:
                        self.counter.add(0, output)
                        self._log.add(0, output)
                        self.times = output.metrics
                        if output.cache_miss is not None and self.counter.cache_report is None:
                            self.counter.cache_report = await self._explained(output.cache_miss)
                        yield 0, output
                return
            async with aclosing(merge(self._streams)) as merged:
                async for index, output in merged:
                    self.counter.add(index, output)
                    self._log.add(index, output)
                    yield index, output

    async def _explained(self, miss: CacheMiss) -> CacheReport:
        return cache_report(miss, await asyncio.to_thread(self._message_of, miss))

    @property
    def _ids(self) -> set[str]:
        """What the client may call this answer."""
        return {self.id} | {name for name in (self._client_id, self._context.request_id) if name is not None}

    async def _abort(self) -> None:
        await self._engine.abort(self._engine_id)


def response_id(prefix: str, context: RequestContext, options: GenerationOptions) -> str:
    """The client's own id, from body or header, is only echoed; inside, every request gets a fresh one."""
    return f"{prefix}{options.request_id or context.request_id or uuid.uuid4().hex}"
