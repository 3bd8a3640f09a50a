"""POST /v1/responses: the events of a conversation in the shapes of OpenAI's Responses API, without its store."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from octavo.entrypoints.api.responses.answers import Event, InputTokens, ResponseBuilder, ResponseObject
from octavo.entrypoints.api.responses.requests import NAMES, InputRequest, ResponsesRequest, to_chat
from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.api.shared.translate import chat_input, chat_task
from octavo.entrypoints.api.shared.typed_events import answer
from octavo.entrypoints.chat.conversation import prepare
from octavo.entrypoints.chat.prompts import chat_token_ids
from octavo.entrypoints.chat.sampling import renamed
from octavo.entrypoints.http.errors import Failure
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import encode_named_event, json_response
from octavo.entrypoints.server.state import ServedModel

router = APIRouter(route_class=JsonRoute)
API = Api(router, (Event, InputTokens, ResponseObject), OPENAI)

STREAM = "`event: TYPE`, `data: Event`, from response.created to response.completed, .incomplete or .failed"


@router.post("/v1/responses", response_class=Response, responses=describe_answer(ResponseObject, stream=STREAM))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation with items: reasoning, messages, function calls. Nothing is stored."""
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.unknown())
    with renamed(NAMES):
        conversation = await prepare(context, model, await chat_task(context, to_chat(body)), id_prefix="resp_")
    builder = ResponseBuilder(conversation, _echo(model, body))

    def broken(failed: Failure) -> bytes:
        return _encode(builder.fail(failed.message))

    return await answer(request, conversation, builder, stream=bool(body.stream), encode=_encode, on_error=broken)


@router.post("/v1/responses/input_tokens", response_class=Response, responses=describe_answer(InputTokens))
async def count_input_tokens(body: InputRequest, request: Request) -> Response:
    """How many tokens a request would have the model read."""
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.unknown())
    with renamed(NAMES):
        chat = to_chat(body)
        tokens = await chat_token_ids(model, await chat_input(context, chat.messages, chat))
    return json_response(InputTokens(len(tokens)))


def _encode(event: Event) -> bytes:
    return encode_named_event(event.type, event)


def _echo(model: ServedModel, body: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request, with the defaults in force."""

    def in_force(name: str, given: float | None) -> float:
        return given if given is not None else model.sampling_defaults.get(name, 1.0)

    def plain(part: BaseModel) -> dict[str, Any]:
        return part.model_dump(exclude_none=True, by_alias=True)

    choice = body.tool_choice or "auto"
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort, "summary": None} if body.reasoning else {"effort": None},
        "temperature": in_force("temperature", body.temperature),
        "top_p": in_force("top_p", body.top_p),
        "text": {"format": {"type": "text"}, **(plain(body.text) if body.text else {})},
        "tool_choice": choice if isinstance(choice, str) else plain(choice),
        "tools": [plain(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
        "metadata": body.metadata or {},
    }
