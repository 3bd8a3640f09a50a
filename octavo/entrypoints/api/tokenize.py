"""POST /tokenize and /detokenize: the model's tokenizer, with the same defaults as the routes that generate."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.api.shared.shapes import ChatMessage, Messages, TemplateOptions, TokenIds, unknown_fields
from octavo.entrypoints.api.shared.translate import chat_input
from octavo.entrypoints.chat.prompts import chat_token_ids, encode
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import json_response
from octavo.exceptions import ValidationError
from octavo.tokenizer.base import Tokenizer

router = APIRouter(route_class=JsonRoute)

BACK = {"text": {"operationId": "detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}}


class TokenizeRequest(TemplateOptions):
    """POST /tokenize: exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    tokens: TokenIds


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


API = Api(router, (Detokenized, Tokenized), OPENAI)


@router.post("/tokenize", response_class=Response, responses=describe_answer(Tokenized, links=BACK))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a prompt, or of messages as the chat route would render them."""
    context = context_of(request)
    model = context.server.model(body.model)
    engine = model.ready_engine()
    note_ignored(request, unknown_fields(body, (), ()))
    if (body.prompt is None) == (body.messages is None):
        raise ValidationError("give exactly one of prompt and messages", parameter="prompt")
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        chat = await chat_input(context, body.messages, body, add_special_tokens=special)
        tokens = await chat_token_ids(model, chat)
    else:
        text, limit = body.prompt or "", engine.info.max_model_len
        tokens = await encode(engine.tokenizer, text, add_special_tokens=special, limit=limit, fits=False)
    strings = await asyncio.to_thread(_strings, engine.tokenizer, tokens) if body.return_token_strs else None
    return json_response(Tokenized(len(tokens), engine.info.max_model_len, tokens, strings))


def _strings(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.token_string(token) for token in tokens]


@router.post("/detokenize", response_class=Response, responses=describe_answer(Detokenized), operation_id="detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens written out."""
    context = context_of(request)
    model = context.server.model(body.model)
    engine = model.ready_engine()
    note_ignored(request, unknown_fields(body, (), ()))
    size = engine.info.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise ValidationError(f"tokens: {token} is not in [0, {size - 1}]", parameter="tokens")
    return json_response(Detokenized(engine.tokenizer.decode(body.tokens, skip_special_tokens=False)))
