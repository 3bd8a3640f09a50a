"""One chat generation as meaning: content, reasoning and tool calls, whatever protocol carries them.

    prepare(context, model, ChatRequest) -> Conversation
    Conversation.events()  -> ChatEvent, ChatEvent, ...        for streams
    Conversation.answer()  -> ChatAnswer, folded from the very same events, so that the two can never differ

Chat completions, responses and messages encode these. Knows nothing of chunks, SSE or any protocol's names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UnsetType

from octavo.entrypoints.chat.parsers.base import Content, Delta, Reasoning, ToolCallDelta
from octavo.entrypoints.openai.answer_constraint import answer_constraint
from octavo.entrypoints.openai.answers import RequestTimes
from octavo.entrypoints.openai.generation import Generation, UsageCounter, response_id
from octavo.entrypoints.openai.prompt_map import Marks, PromptMap, chat_marks
from octavo.entrypoints.openai.prompts import ChatPrompt, ChatSetup, chat_setup, encode_chat, output_budget, truncate
from octavo.entrypoints.openai.protocol import ChatRequest
from octavo.entrypoints.openai.reading import PLAIN, Reader, Reading, reader_for, thinking_is_open
from octavo.entrypoints.openai.sampling import check_weight, sampling_params
from octavo.entrypoints.openai.translate import renamed
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError
from octavo.messages import ThinkingTokens

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, Logprob
    from octavo.messages import CachePin, SamplingParams
    from octavo.tokenizer.base import Tokenizer

__all__ = ["ChatAnswer", "ChatEvent", "Choice", "Content", "Conversation", "Delta"]
__all__ += ["Reasoning", "ToolCall", "ToolCallDelta", "prepare"]

Logprobs = Sequence[dict[int, "Logprob"]]


class ChatEvent(msgspec.Struct, frozen=True):
    """News of choice ``index``: what one step of the engine, or the end, came to.

    ``token_ids`` and ``logprobs`` (one entry a token; None unless asked for) are the raw new tokens, which may make
    no delta yet. ``finish_reason`` is None until the choice's last event.
    """

    index: int
    deltas: Sequence[Delta]
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ToolCall(msgspec.Struct):
    """One whole call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class Choice(msgspec.Struct):
    """One whole message. ``reasoning`` is None where the model did not think aloud."""

    index: int
    content: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer(msgspec.Struct, frozen=True):
    """All choices, by index, and the prompt's logprobs where asked for (one entry a token, the first None)."""

    choices: list[Choice]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None


class Conversation:
    """A checked request, ready to run once: iterate :meth:`events` or await :meth:`answer`.

    Nothing is computed before that. ``counter.usage()`` is right at any time; ``prompt_logprobs`` is set by the first
    event.
    """

    def __init__(
        self,
        generation: Generation,
        request: ChatRequest,
        prompt_text: str = "",
        reader: Reader = PLAIN,
        role: str = "assistant",
    ) -> None:
        self.request = request
        self.prompt_text = prompt_text
        self.role = role
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self._generation = generation
        self._reader = reader
        self._readings: dict[int, Reading] = {}

    @property
    def id(self) -> str:
        return self._generation.id

    @property
    def model(self) -> str:
        return self._generation.model

    @property
    def created(self) -> int:
        """Seconds since the epoch."""
        return self._generation.created

    @property
    def system_fingerprint(self) -> str | None:
        return self._generation.system_fingerprint

    @property
    def n(self) -> int:
        return self._generation.n

    @property
    def counter(self) -> UsageCounter:
        return self._generation.counter

    @property
    def tokenizer(self) -> Tokenizer:
        return self._generation.tokenizer

    @property
    def cache_pins(self) -> Sequence[CachePin]:
        """What of the prompt the request wishes to be kept."""
        return self._generation.cache.pins

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._generation.prompts[0]

    @property
    def sampling_params(self) -> SamplingParams:
        return self._generation.params[0]

    @property
    def echoed(self) -> str:
        """What ``echo`` puts before every answer: the last message, where the answer is of the same role."""
        last = self.request.messages[-1]
        return last.content if self.request.echo and last.role == self.role and isinstance(last.content, str) else ""

    @property
    def stream_usage(self) -> tuple[bool, bool]:
        """(a usage chunk at the end, usage in every chunk)."""
        return self._generation.stream_usage

    def metrics(self) -> RequestTimes | UnsetType | None:
        """The times so far for the answer's body, where they were asked for."""
        return self._generation.metrics()

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Close it to abort the request. Raises RequestError if a choice fails, EngineDeadError if the engine dies."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output.prompt_logprobs
                for choice in output.outputs:
                    yield self._event(choice)

    def _event(self, choice: CompletionOutput) -> ChatEvent:
        reading = self._readings.get(choice.index)
        if reading is None:
            reading = self._readings[choice.index] = Reading(self._reader, self.tokenizer)
        deltas, reason = reading.feed(choice.text, choice.token_ids, choice.finish_reason)
        if reason is not None and self._reader.reasons:
            self.counter.reasoning_tokens = sum(r.reasoning_tokens or 0 for r in self._readings.values())
        return ChatEvent(choice.index, deltas, choice.token_ids, choice.logprobs, reason, choice.stop_reason)

    async def answer(self) -> ChatAnswer:
        """Run to the end and fold the events."""
        choices: dict[int, Choice] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                fold(choices.setdefault(event.index, Choice(event.index)), event)
        return ChatAnswer([choices[index] for index in sorted(choices)], self.prompt_logprobs)


def fold(choice: Choice, event: ChatEvent) -> None:
    """Add ``event`` to the message that it is a piece of."""
    for delta in event.deltas:
        if isinstance(delta, Content):
            choice.content += delta.text
        elif isinstance(delta, Reasoning):
            choice.reasoning = (choice.reasoning or "") + delta.text
        else:
            if delta.index == len(choice.tool_calls):
                choice.tool_calls.append(ToolCall(delta.id or "", delta.name or "", ""))
            choice.tool_calls[delta.index].arguments += delta.arguments
    choice.token_ids += event.token_ids
    if event.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or []), *event.logprobs]
    choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason


async def prepare(
    context: RequestContext,
    model: ServedModel,
    request: ChatRequest,
    *,
    id_prefix: str = "chatcmpl-",
    clamp_output: bool = False,
    marks: Marks | None = None,
) -> Conversation:
    """Check everything and render the prompt. Raises ValidationError naming the field, before an answer has begun.

    Raises OverloadedError before any work, or once the size is known.

    With ``clamp_output`` the answer may have as many tokens as the context has room for, when more were asked for.
    ``marks`` are those of the messages themselves unless the client spoke of others.
    """
    engine = model.ready_engine()
    engine.check_queue(context.tenant)
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested: int | None = getattr(request, field)
    if requested is not None and requested < 1:
        raise ValidationError(f"{field} must be at least 1, got {requested}", parameter=field)
    limit = engine.info.max_model_len
    marks = marks or chat_marks(request.messages)
    setup = await chat_setup(model, request, off_loop=context.large_body)
    prompt = await encode_chat(
        engine.tokenizer,
        request.messages,
        request,
        setup,
        add_special_tokens=request.add_special_tokens,
        limit=limit,
        fits=request.truncate_prompt_tokens is None,
        off_loop=context.large_body,
    )
    token_ids = truncate(
        prompt.token_ids, request.truncate_prompt_tokens, requested or 1, limit, side=request.truncation_side
    )
    exactly, at_most = (None, requested) if clamp_output else (requested, model.sampling_defaults.get("max_tokens"))
    budget = output_budget(len(token_ids), exactly, at_most, limit, prompt_field="messages", field=field)
    identity = response_id(id_prefix, context, request)
    with renamed(
        {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": field}
    ):  # the engine's words for what the client gave
        params = sampling_params(
            request,
            model.sampling_defaults,
            max_tokens=budget,
            logprobs=_top_logprobs(request),
            prompt_logprobs=request.prompt_logprobs,
        )
        check_weight(params, num_prompts=1)
        params = _for_reading(params, request, setup, prompt)
        parts = PromptMap(engine.tokenizer, request, setup, prompt, marks, len(token_ids))
        more = {"cache_pins": await parts.pins(), "explain": parts.report}
        generation = await Generation.begin(
            context, model, request, [token_ids], [params], response_id=identity, **more
        )
    role = request.messages[-1].role if request.continue_final_message else model.chat_config.response_role
    return Conversation(generation, request, prompt.text, reader_for(request, setup, prompt), role)


def _for_reading(params: SamplingParams, request: ChatRequest, setup: ChatSetup, prompt: ChatPrompt) -> SamplingParams:
    """``params``, so that the parsers see their tags, and the text is held to what calls and content must be."""
    changes: dict[str, Any] = {}
    if tags := setup.format.think_tags + (setup.format.call_tags if setup.use.schemas else ()):
        changes["shown_special_token_ids"] = list(tags)
    thinking = thinking_is_open(request, setup, prompt)
    start, end = None if thinking else setup.format.think_start, setup.format.think_end
    if params.thinking_token_budget is not None and end is not None and (thinking or start is not None):
        changes["thinking"] = ThinkingTokens(start=start, end=end)
    constraint = answer_constraint(
        setup,
        params.structured_outputs,
        parallel=request.parallel_tool_calls is not False,
        thinking=thinking,
        raw=request.structured_outputs is not None,
    )
    if constraint is not params.structured_outputs:
        changes["structured_outputs"] = constraint
    return params.replace(**changes) if changes else params


def _top_logprobs(request: ChatRequest) -> int | None:
    """How many alternatives a token gets; None without logprobs."""
    if not request.logprobs:
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(request, name):
                raise ValidationError(f"{name} needs logprobs to be true", parameter=name)
        return None
    return request.top_logprobs or 0
