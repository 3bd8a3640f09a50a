"""POST /v1/messages and /v1/messages/count_tokens: conversations in the shapes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.anthropic.answers import MessageAnswer, TokensCount
from octavo.entrypoints.anthropic.builder import MessageBuilder
from octavo.entrypoints.anthropic.protocol import NAMES, CountTokensRequest, MessagesRequest, to_chat
from octavo.entrypoints.openai.conversation import Conversation, prepare
from octavo.entrypoints.openai.errors import anthropic_error_body, describe
from octavo.entrypoints.openai.openapi import describe_answer
from octavo.entrypoints.openai.prompts import chat_token_ids
from octavo.entrypoints.openai.routing import JsonRoute, note_ignored, server_state
from octavo.entrypoints.openai.sse import (
    CLIENT_CLOSED,
    EventStream,
    encode_named_event,
    json_response,
    until_disconnect,
)
from octavo.entrypoints.openai.translate import renamed

router = APIRouter(route_class=JsonRoute)

STREAM = "`event: TYPE`, `data:` MessageStart, Ping, ContentBlockStart, ... MessageStop"


@router.post("/v1/messages", response_class=Response, responses=describe_answer(MessageAnswer, stream=STREAM))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """The assistant's next message, whole or as a stream of events."""
    state = server_state(request)
    engine = state.ready_engine()
    state.check_model(body.model)
    note_ignored(request, body.unknown())
    with renamed(NAMES):
        conversation = await prepare(state, engine, to_chat(body), id_prefix="msg_", clamp_output=True)
    builder = MessageBuilder(conversation, body.max_tokens)
    if body.stream:
        return EventStream(_events(conversation, builder), _error_event)
    answer = await until_disconnect(request.receive, _complete(conversation, builder))
    return json_response(answer) if answer is not None else Response(status_code=CLIENT_CLOSED)


@router.post("/v1/messages/count_tokens", response_class=Response, responses=describe_answer(TokensCount))
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens a request would have the model read."""
    state = server_state(request)
    state.ready_engine()
    state.check_model(body.model)
    with renamed(NAMES):
        chat = to_chat(body)
        tokens = await chat_token_ids(state, chat.messages, chat)
    return json_response(TokensCount(len(tokens)))


async def _complete(conversation: Conversation, builder: MessageBuilder) -> MessageAnswer:
    async with aclosing(conversation.events()) as events:
        async for news in events:
            for _ in builder.feed(news):
                pass
    return builder.message()


async def _events(conversation: Conversation, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    for event in builder.start():
        yield _encode(event)
    async with aclosing(conversation.events()) as events:
        async for news in events:
            for event in builder.feed(news):
                yield _encode(event)
    for event in builder.finish():
        yield _encode(event)


def _encode(event: msgspec.Struct) -> bytes:
    return encode_named_event(str(event.__struct_config__.tag), event)


def _error_event(error: BaseException) -> bytes:
    status, message, _ = describe(error)
    return b"event: error\ndata: " + anthropic_error_body(status, message) + b"\n\n"
