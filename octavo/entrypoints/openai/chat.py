"""POST /v1/chat/completions: the events of a conversation in OpenAI's shapes, whole or as chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from octavo.entrypoints.api.shared.errors import DONE, error_event
from octavo.entrypoints.chat.parsers.base import Content, Delta, Reasoning
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import (
    CLIENT_CLOSED,
    EventStream,
    encode_event,
    json_response,
    until_disconnect,
)
from octavo.entrypoints.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatToolCall,
    FunctionCall,
    MessageDelta,
)
from octavo.entrypoints.openai.conversation import ChatAnswer, ChatEvent, Choice, Conversation, Logprobs, prepare
from octavo.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.entrypoints.openai.protocol import REFUSED_IN_CHAT, ChatRequest

router = APIRouter(route_class=JsonRoute)


STREAM = "`data: ChatChunk` an event, `data: [DONE]` at the end"


@router.post("/v1/chat/completions", response_class=Response, responses=describe_answer(ChatCompletion, stream=STREAM))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.refuse(REFUSED_IN_CHAT))
    conversation = await prepare(context, model, body)
    if body.stream:
        return EventStream(_chunks(conversation), error_event)
    answer = await until_disconnect(request.receive, _complete(conversation))
    return json_response(answer) if answer is not None else Response(status_code=CLIENT_CLOSED)


def _logprobs(conversation: Conversation, token_ids: list[int], entries: Logprobs | None) -> ChatLogprobs | None:
    if not conversation.request.logprobs or not token_ids:
        return None
    request = conversation.request
    top, ids, as_ids = request.top_logprobs or 0, request.logprob_token_ids, bool(request.return_tokens_as_token_ids)
    return chat_logprobs(conversation.tokenizer, token_ids, entries or [], top, ids=ids, as_ids=as_ids)


async def _complete(conversation: Conversation) -> ChatCompletion:
    answer = await conversation.answer()
    if conversation.request.logprobs or answer.prompt_logprobs is not None:  # there may be very many
        return await asyncio.to_thread(_completion, conversation, answer)
    return _completion(conversation, answer)


def _completion(conversation: Conversation, answer: ChatAnswer) -> ChatCompletion:
    wants_ids = conversation.request.return_token_ids
    table = answer.prompt_logprobs
    return ChatCompletion(
        id=conversation.id,
        created=conversation.created,
        model=conversation.model,
        choices=[_choice(conversation, choice) for choice in answer.choices],
        system_fingerprint=conversation.system_fingerprint,
        usage=conversation.counter.usage(),
        metrics=conversation.metrics(),
        prompt_logprobs=UNSET if table is None else prompt_logprobs(table),
        prompt_token_ids=conversation.prompt_token_ids if wants_ids else UNSET,
        prompt_text=conversation.prompt_text if conversation.request.return_prompt_text else UNSET,
    )


def _choice(conversation: Conversation, choice: Choice) -> ChatChoice:
    calls = [ChatToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in choice.tool_calls]
    return ChatChoice(
        index=choice.index,
        message=AssistantMessage(
            role=conversation.role,
            content=conversation.echoed + choice.content or (None if calls else ""),
            tool_calls=calls or UNSET,
            reasoning=UNSET if choice.reasoning is None else choice.reasoning,
        ),
        logprobs=_logprobs(conversation, choice.token_ids, choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if conversation.request.return_token_ids else UNSET,
    )


async def _chunks(conversation: Conversation) -> AsyncGenerator[bytes, None]:
    """Per choice: role with empty content, deltas, one finish_reason; then usage if asked for, then [DONE]."""
    final_usage, running_usage = conversation.stream_usage

    def event(choice: ChatChunkChoice | None, **more: Any) -> bytes:
        usage: Any = UNSET
        if running_usage or choice is None:
            usage = conversation.counter.usage()
        elif final_usage:
            usage = None
        return encode_event(
            ChatChunk(
                id=conversation.id,
                created=conversation.created,
                model=conversation.model,
                choices=[] if choice is None else [choice],
                system_fingerprint=conversation.system_fingerprint,
                usage=usage,
                metrics=conversation.metrics() if choice is None else UNSET,
                **more,
            )
        )

    prompt_ids = conversation.prompt_token_ids if conversation.request.return_token_ids else UNSET
    prompt_text = conversation.prompt_text if conversation.request.return_prompt_text else UNSET
    for index in range(conversation.n):
        first = ChatChunkChoice(index=index, delta=MessageDelta(role=conversation.role, content=""))
        yield event(first, prompt_token_ids=prompt_ids, prompt_text=prompt_text)
        if conversation.echoed:
            yield event(ChatChunkChoice(index=index, delta=MessageDelta(content=conversation.echoed)))
    async with aclosing(conversation.events()) as events:
        async for news in events:
            for chunk in _delta_chunks(conversation, news):
                yield event(chunk)
    if final_usage:
        yield event(None)
    yield DONE


def _delta_chunks(conversation: Conversation, news: ChatEvent) -> list[ChatChunkChoice]:
    """A chunk a delta, and one for the end. Held back text makes no chunk, unless its tokens themselves were asked for.

    Token ids and logprobs go with the first chunk of their step.
    """
    request = conversation.request
    deltas = [_message_delta(delta) for delta in news.deltas]
    logprobs, token_ids = None, None
    if news.token_ids and (request.logprobs or request.return_token_ids):
        logprobs = _logprobs(conversation, news.token_ids, news.logprobs)
        token_ids = news.token_ids if request.return_token_ids else None
        deltas = deltas or [MessageDelta(content="")]
    chunks = []
    for delta in deltas:
        chunks.append(
            ChatChunkChoice(
                index=news.index, delta=delta, logprobs=logprobs, token_ids=UNSET if token_ids is None else token_ids
            )
        )
        logprobs = token_ids = None
    if news.finish_reason is not None:
        chunks.append(
            ChatChunkChoice(
                index=news.index,
                delta=MessageDelta(),
                finish_reason=news.finish_reason,
                stop_reason=news.stop_reason,
            )
        )
    return chunks


def _message_delta(delta: Delta) -> MessageDelta:
    if isinstance(delta, Content):
        return MessageDelta(content=delta.text)
    if isinstance(delta, Reasoning):
        return MessageDelta(reasoning=delta.text)
    if delta.id is None:
        call = ChatToolCall(index=delta.index, type=UNSET, function=FunctionCall(UNSET, delta.arguments))
    else:
        call = ChatToolCall(index=delta.index, id=delta.id, function=FunctionCall(delta.name or "", delta.arguments))
    return MessageDelta(tool_calls=[call])
