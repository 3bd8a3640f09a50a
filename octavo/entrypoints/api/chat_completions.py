"""POST /v1/chat/completions: the events of a conversation in OpenAI's shapes, whole or as chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from octavo.entrypoints.api.shared.answers import (
    RenderedPrompt,
    RequestTimes,
    Usage,
    metrics_of,
    rendered,
    stream_usage,
    usage_of,
    wants_metrics,
)
from octavo.entrypoints.api.shared.errors import DONE, OPENAI, error_event
from octavo.entrypoints.api.shared.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from octavo.entrypoints.api.shared.shapes import REFUSED_IN_CHAT, ChatRequest
from octavo.entrypoints.api.shared.translate import chat_task
from octavo.entrypoints.chat.conversation import ChatAnswer, ChatEvent, Choice, Conversation, Logprobs, prepare
from octavo.entrypoints.chat.parsers.base import Content, Delta, Reasoning
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import encode_event, json_response, respond
from octavo.entrypoints.server.context import RequestContext

router = APIRouter(route_class=JsonRoute)

STREAM = "`data: ChatChunk` an event, `data: [DONE]` at the end"


class FunctionCall(msgspec.Struct, frozen=True):
    name: str | UnsetType
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call, or (with ``index``) a piece of one in a chunk."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    usage: Usage
    metrics: RequestTimes | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ChatMessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatMessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


API = Api(router, (ChatChunk, ChatCompletion, RenderedPrompt), OPENAI)


@router.post("/v1/chat/completions", response_class=Response, responses=describe_answer(ChatCompletion, stream=STREAM))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    answer = await _prepared(body, request)
    return await respond(request, answer.complete, answer.chunks, error_event, stream=bool(body.stream))


@router.post("/v1/chat/completions/render", response_class=Response, responses=describe_answer(RenderedPrompt))
async def render_chat_completion(body: ChatRequest, request: Request) -> Response:
    """What POST /v1/chat/completions would do with this body: prompt, token ids, sampling parameters."""
    generation = (await _prepared(body, request)).generation
    return json_response(rendered(generation, generation.prompts[0], generation.params[0]))


async def _prepared(body: ChatRequest, request: Request) -> ChatCompletionAnswer:
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.refuse(REFUSED_IN_CHAT))
    return ChatCompletionAnswer(await prepare(context, model, await chat_task(context, body)), context, body)


class ChatCompletionAnswer:
    """Turns the events of a conversation into what ``body`` asks for."""

    def __init__(self, conversation: Conversation, context: RequestContext, body: ChatRequest) -> None:
        self._conversation, self._body = conversation, body
        self.generation = conversation.generation
        self._stream_usage, self._wants_metrics = stream_usage(context, body), wants_metrics(context, body)

    async def complete(self) -> ChatCompletion:
        """The whole answer."""
        answer = await self._conversation.answer()
        if self._body.logprobs or answer.prompt_logprobs is not None:  # there may be very many
            return await asyncio.to_thread(self._completion, answer)
        return self._completion(answer)

    def _completion(self, answer: ChatAnswer) -> ChatCompletion:
        generation, table = self.generation, answer.prompt_logprobs
        return ChatCompletion(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=[self._choice(choice) for choice in answer.choices],
            system_fingerprint=generation.system_fingerprint,
            usage=usage_of(generation.counter),
            metrics=metrics_of(generation, wanted=self._wants_metrics),
            prompt_logprobs=UNSET if table is None else prompt_logprobs(table),
            prompt_token_ids=generation.prompts[0] if self._body.return_token_ids else UNSET,
            prompt_text=self._conversation.prompt_text if self._body.return_prompt_text else UNSET,
        )

    def _choice(self, choice: Choice) -> ChatChoice:
        calls = [
            ChatToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in choice.tool_calls
        ]
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(
                role=self._conversation.role,
                content=self._conversation.echoed + choice.content or (None if calls else ""),
                tool_calls=calls or UNSET,
                reasoning=UNSET if choice.reasoning is None else choice.reasoning,
            ),
            logprobs=self._logprobs(choice.token_ids, choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, token_ids: list[int], entries: Logprobs | None) -> ChatLogprobs | None:
        body = self._body
        if not body.logprobs or not token_ids:
            return None
        top, ids, as_ids = body.top_logprobs or 0, body.logprob_token_ids, bool(body.return_tokens_as_token_ids)
        return chat_logprobs(self.generation.tokenizer, token_ids, entries or [], top, ids=ids, as_ids=as_ids)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Per choice: role with empty content, deltas, one finish_reason; then usage if asked for, then [DONE]."""
        conversation, body = self._conversation, self._body
        prompt_ids = self.generation.prompts[0] if body.return_token_ids else UNSET
        prompt_text = conversation.prompt_text if body.return_prompt_text else UNSET
        for index in range(self.generation.n):
            first = ChatChunkChoice(index=index, delta=ChatMessageDelta(role=conversation.role, content=""))
            yield self._chunk(first, prompt_token_ids=prompt_ids, prompt_text=prompt_text)
            if conversation.echoed:
                yield self._chunk(ChatChunkChoice(index=index, delta=ChatMessageDelta(content=conversation.echoed)))
        async with aclosing(conversation.events()) as events:
            async for news in events:
                for chunk in self._delta_chunks(news):
                    yield self._chunk(chunk)
        final_usage, _ = self._stream_usage
        if final_usage:
            yield self._chunk(None)
        yield DONE

    def _chunk(self, choice: ChatChunkChoice | None, **more: Any) -> bytes:
        """One event; None is the last one, which has the usage."""
        generation, (final_usage, running_usage) = self.generation, self._stream_usage
        usage: Any = UNSET
        if running_usage or choice is None:
            usage = usage_of(generation.counter)
        elif final_usage:
            usage = None
        return encode_event(
            ChatChunk(
                id=generation.id,
                created=generation.created,
                model=generation.model,
                choices=[] if choice is None else [choice],
                system_fingerprint=generation.system_fingerprint,
                usage=usage,
                metrics=metrics_of(generation, wanted=self._wants_metrics) if choice is None else UNSET,
                **more,
            )
        )

    def _delta_chunks(self, news: ChatEvent) -> list[ChatChunkChoice]:
        """A chunk a delta, and one for the end. Held back text makes no chunk, unless its tokens were asked for.

        Token ids and logprobs go with the first chunk of their step.
        """
        deltas = [_message_delta(delta) for delta in news.deltas]
        logprobs, token_ids = None, None
        if news.token_ids and (self._body.logprobs or self._body.return_token_ids):
            logprobs = self._logprobs(news.token_ids, news.logprobs)
            token_ids = news.token_ids if self._body.return_token_ids else None
            deltas = deltas or [ChatMessageDelta(content="")]
        chunks = []
        for delta in deltas:
            chunks.append(
                ChatChunkChoice(
                    index=news.index,
                    delta=delta,
                    logprobs=logprobs,
                    token_ids=UNSET if token_ids is None else token_ids,
                )
            )
            logprobs = token_ids = None
        if news.finish_reason is not None:
            chunks.append(
                ChatChunkChoice(
                    index=news.index,
                    delta=ChatMessageDelta(),
                    finish_reason=news.finish_reason,
                    stop_reason=news.stop_reason,
                )
            )
        return chunks


def _message_delta(delta: Delta) -> ChatMessageDelta:
    if isinstance(delta, Content):
        return ChatMessageDelta(content=delta.text)
    if isinstance(delta, Reasoning):
        return ChatMessageDelta(reasoning=delta.text)
    if delta.id is None:
        call = ChatToolCall(index=delta.index, type=UNSET, function=FunctionCall(UNSET, delta.arguments))
    else:
        call = ChatToolCall(index=delta.index, id=delta.id, function=FunctionCall(delta.name or "", delta.arguments))
    return ChatMessageDelta(tool_calls=[call])
