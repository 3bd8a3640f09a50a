"""One chat generation as meaning: content, reasoning and tool calls, whatever protocol carries them.

    prepare(context, model, ChatTask) -> Conversation
    Conversation.events()  -> ChatEvent, ChatEvent, ...        for streams
    Conversation.answer()  -> ChatAnswer, folded from the very same events, so that the two can never differ

The APIs encode these. Knows nothing of chunks, SSE or any protocol's names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.entrypoints.chat.constraints import answer_constraint
from octavo.entrypoints.chat.generation import Generation, response_id
from octavo.entrypoints.chat.parsers.base import Content, Delta, Reasoning
from octavo.entrypoints.chat.prompt_map import Marks, PromptMap, chat_marks
from octavo.entrypoints.chat.prompts import ChatInput, ChatSetup, chat_setup, encode_chat, output_budget, truncate
from octavo.entrypoints.chat.reading import PLAIN, Reader, Reading, ReplyOptions, reader_for, thinking_is_open
from octavo.entrypoints.chat.sampling import GenerationOptions, check_weight, renamed, sampling_params
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import ServedModel
from octavo.exceptions import ValidationError
from octavo.messages import ThinkingTokens

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, Logprob
    from octavo.messages import SamplingParams

Logprobs = Sequence[dict[int, "Logprob"]]


@dataclass(frozen=True)
class ChatTask:
    """One chat generation that is asked for: what the model reads, how it goes on, and what of it is told."""

    input: ChatInput
    generation: GenerationOptions
    reply: ReplyOptions


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

    Nothing is computed before that. The counter of ``generation`` is right at any time; ``prompt_logprobs`` is set by
    the first event.
    """

    def __init__(
        self, generation: Generation, task: ChatTask, prompt_text: str, reader: Reader = PLAIN, role: str = "assistant"
    ) -> None:
        self.generation, self.reply = generation, task.reply
        self.prompt_text, self.role = prompt_text, role
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self._last = task.input.messages[-1]
        self._reader = reader
        self._readings: dict[int, Reading] = {}

    @property
    def echoed(self) -> str:
        """What ``echo`` puts before every answer: the last message, where the answer is of the same role."""
        content = self._last.get("content")
        same = self.reply.echo and self._last.get("role") == self.role
        return content if same and isinstance(content, str) else ""

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Close it to abort the request. Raises RequestError if a choice fails, EngineDeadError if the engine dies."""
        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output.prompt_logprobs
                for choice in output.outputs:
                    yield self._event(choice)

    def _event(self, choice: CompletionOutput) -> ChatEvent:
        reading = self._readings.get(choice.index)
        if reading is None:
            reading = self._readings[choice.index] = Reading(self._reader, self.generation.tokenizer)
        deltas, reason = reading.feed(choice.text, choice.token_ids, choice.finish_reason)
        if reason is not None and self._reader.reasons:
            thought = sum(r.reasoning_tokens or 0 for r in self._readings.values())
            self.generation.counter.reasoning_tokens = thought
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
    task: ChatTask,
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
    engine, chat, options = model.ready_engine(), task.input, task.generation
    engine.check_queue(context.tenant)
    requested, field = options.max_tokens, options.max_tokens_field
    if requested is not None and requested < 1:
        raise ValidationError(f"{field} must be at least 1, got {requested}", parameter=field)
    limit, keep = engine.info.max_model_len, options.keep_prompt_tokens
    marks = marks or chat_marks(chat.messages)
    setup = await chat_setup(model, chat)
    prompt = await encode_chat(engine.tokenizer, chat, setup, limit=limit, fits=keep is None)
    token_ids = truncate(prompt.token_ids, keep, requested or 1, limit, side=options.truncation_side)
    exactly, at_most = (None, requested) if clamp_output else (requested, model.sampling_defaults.get("max_tokens"))
    budget = output_budget(len(token_ids), exactly, at_most, limit, prompt_field="messages", field=field)
    thinking = thinking_is_open(chat, setup, prompt)
    with renamed(
        {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": field}
    ):  # the engine's words for what the client gave
        params = sampling_params(
            options,
            model.sampling_defaults,
            max_tokens=budget,
            logprobs=_top_logprobs(task),
            prompt_logprobs=options.prompt_logprobs,
        )
        check_weight(params, num_prompts=1)
        params = _for_reading(params, task, setup, thinking=thinking)
        num_cut = len(prompt.token_ids) - len(token_ids) if options.truncation_side != "right" else 0
        parts = PromptMap(engine.tokenizer, chat, setup, prompt, marks, num_cut)
        options = replace(options, cache=msgspec.structs.replace(options.cache, pins=tuple(await parts.pins())))
        more: dict[str, Any] = {"response_id": response_id(id_prefix, context, options), "message_of": parts.message_of}
        generation = await Generation.begin(context, model, options, [token_ids], [params], **more)
    role = chat.messages[-1]["role"] if chat.continue_final_message else model.chat_config.response_role
    return Conversation(generation, task, prompt.text, reader_for(task.reply, setup, thinking=thinking), role)


def _for_reading(params: SamplingParams, task: ChatTask, setup: ChatSetup, *, thinking: bool) -> SamplingParams:
    """``params``, so that the parsers see their tags, and the text is held to what calls and content must be."""
    changes: dict[str, Any] = {}
    if tags := setup.format.think_tags + (setup.format.call_tags if setup.use.schemas else ()):
        changes["shown_special_token_ids"] = list(tags)
    start, end = None if thinking else setup.format.think_start, setup.format.think_end
    if params.thinking_token_budget is not None and end is not None and (thinking or start is not None):
        changes["thinking"] = ThinkingTokens(start=start, end=end)
    constraint = answer_constraint(
        setup,
        params.structured_outputs,
        parallel=task.reply.parallel_tool_calls,
        thinking=thinking,
        raw=task.generation.structured_outputs is not None,
    )
    if constraint is not params.structured_outputs:
        changes["structured_outputs"] = constraint
    return params.replace(**changes) if changes else params


def _top_logprobs(task: ChatTask) -> int | None:
    """How many alternatives a token gets; None without logprobs."""
    top = task.reply.top_logprobs
    if not task.reply.logprobs:
        needing = {"top_logprobs": top, "logprob_token_ids": task.generation.sampling.get("logprob_token_ids")}
        for name, value in needing.items():
            if value:
                raise ValidationError(f"{name} needs logprobs to be true", parameter=name)
        return None
    return top or 0
