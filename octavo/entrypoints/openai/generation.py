"""What completions and chat share once their prompts are token ids: run them, merge their outputs, count tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.openai.answers import PromptTokensDetails, Usage
from octavo.entrypoints.openai.protocol import GenerationRequest

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.outputs import RequestOutput
    from octavo.messages import SamplingParams


async def merge(streams: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[tuple[int, Any], None]:
    """(index of the stream, item) as they come. Closing it closes every stream; an exception in one ends all."""
    queue: asyncio.Queue[tuple[int, Any, BaseException | None] | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[Any]) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for item in stream:
                    queue.put_nowait((index, item, None))
        except Exception as caught:
            error = caught
        queue.put_nowait((index, None, error) if error else None)

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
    cached: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count ``output``, whose token ids are new ones."""
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.cached[prompt_index] = output.num_cached_tokens

    def usage(self) -> Usage:
        prompt = sum(self.prompt_lengths)
        details = PromptTokensDetails(sum(self.cached.values()))
        return Usage(prompt, self.completion_tokens, prompt + self.completion_tokens, details)


class Generation:
    """The prompts of one HTTP request on their way through the engine.

    Construction lets the engine check every prompt, so ValidationError comes before an answer has begun; nothing is
    computed until :meth:`outputs` is iterated.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        request: GenerationRequest,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        response_id: str,
        model: str,
    ) -> None:
        self.request, self.prompts = request, prompts
        self.tokenizer = engine.tokenizer
        self.id, self.model, self.created = response_id, model, int(time.time())
        self.n = params[0].n
        self.counter = UsageCounter([len(prompt) for prompt in prompts])
        self._streams = [
            engine.generate(prompt, one, priority=request.priority, cache_salt=request.cache_salt)
            for prompt, one in zip(prompts, params, strict=True)
        ]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) as they come; closing it aborts what still runs. Raises RequestError if one fails."""
        if len(self._streams) == 1:  # the usual case, once per token: straight through
            async with aclosing(self._streams[0]) as stream:
                async for output in stream:
                    self.counter.add(0, output)
                    yield 0, output
            return
        async with aclosing(merge(self._streams)) as merged:
            async for index, output in merged:
                self.counter.add(index, output)
                yield index, output

    @property
    def stream_usage(self) -> tuple[bool, bool]:
        """(a usage chunk at the end, usage in every chunk)."""
        options = self.request.stream_options
        return bool(options and options.include_usage), bool(options and options.continuous_usage_stats)


def response_id(prefix: str, request: GenerationRequest) -> str:
    """The client's own id is only echoed; inside, every request gets a fresh one."""
    return f"{prefix}-{request.request_id or uuid.uuid4().hex}"
