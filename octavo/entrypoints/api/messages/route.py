"""POST /v1/messages and /v1/messages/count_tokens: conversations in the shapes of Anthropic's Messages API."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.api.messages.answers import (
    ANTHROPIC,
    EVENTS,
    MessageAnswer,
    MessageBuilder,
    TokensCount,
    error_body,
)
from octavo.entrypoints.api.messages.requests import NAMES, CountTokensRequest, MessagesRequest, read_messages, to_chat
from octavo.entrypoints.api.shared.translate import chat_input, chat_task
from octavo.entrypoints.api.shared.typed_events import answer
from octavo.entrypoints.chat.conversation import prepare
from octavo.entrypoints.chat.prompts import chat_formats, chat_token_ids
from octavo.entrypoints.chat.sampling import renamed
from octavo.entrypoints.http.errors import Failure
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import encode_named_event, json_response

router = APIRouter(route_class=JsonRoute)
API = Api(router, (MessageAnswer, TokensCount, *EVENTS), ANTHROPIC)

STREAM = "`event: TYPE`, `data:` MessageStart, Ping, ContentBlockStart, ... MessageStop"


@router.post("/v1/messages", response_class=Response, responses=describe_answer(MessageAnswer, stream=STREAM))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """The assistant's next message, whole or as a stream of events."""
    context = context_of(request)
    model = context.server.model(body.model)
    budget = chat_formats(model).default.think_end is not None
    note_ignored(request, body.ignored(budget=budget))
    with renamed(NAMES):
        marks = read_messages(body).marks()
        chat = to_chat(body, budget=budget)
        task = await chat_task(context, chat)
        conversation = await prepare(context, model, task, id_prefix="msg_", clamp_output=True, marks=marks)
    builder = MessageBuilder(conversation, body.max_tokens)

    def broken(failed: Failure) -> bytes:
        return b"event: error\ndata: " + error_body(*failed[:3], context.request_id) + b"\n\n"

    return await answer(request, conversation, builder, stream=bool(body.stream), encode=_encode, on_error=broken)


@router.post("/v1/messages/count_tokens", response_class=Response, responses=describe_answer(TokensCount))
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens a request would have the model read."""
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.ignored(budget=True))
    with renamed(NAMES):
        chat = to_chat(body)
        tokens = await chat_token_ids(model, await chat_input(context, chat.messages, chat))
    return json_response(TokensCount(len(tokens)))


def _encode(event: msgspec.Struct) -> bytes:
    return encode_named_event(str(event.__struct_config__.tag), event)
