"""POST /tokenize and /detokenize: the model's tokenizer, with the same defaults as the routes that generate."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.openai.answers import Detokenized, Tokenized
from octavo.entrypoints.openai.prompts import chat_token_ids, encode
from octavo.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest, unknown_fields
from octavo.exceptions import ValidationError
from octavo.tokenizer.base import Tokenizer

router = APIRouter(route_class=JsonRoute)


BACK = {"text": {"operationId": "detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}}


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
        tokens = await chat_token_ids(context, model, body.messages, body, add_special_tokens=special)
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
