"""POST .../render: the prompt that a request would come to, without running it."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import JsonRoute, context_of, note_ignored
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.openai import completions
from octavo.entrypoints.openai.answers import RenderedPrompt, RenderedPrompts
from octavo.entrypoints.openai.conversation import Conversation, prepare
from octavo.entrypoints.openai.generation import Generation
from octavo.entrypoints.openai.protocol import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, ChatRequest, CompletionRequest
from octavo.messages import SamplingParams

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions/render", response_class=Response, responses=describe_answer(RenderedPrompt))
async def render_chat_completion(body: ChatRequest, request: Request) -> Response:
    """What POST /v1/chat/completions would do with this body: prompt, token ids, sampling parameters."""
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.refuse(REFUSED_IN_CHAT))
    chat = await prepare(context, model, body)
    return json_response(_rendered(chat, chat.prompt_token_ids, chat.sampling_params))


@router.post("/v1/completions/render", response_class=Response, responses=describe_answer(RenderedPrompts))
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """What POST /v1/completions would do with this body, prompt by prompt."""
    context = context_of(request)
    model = context.server.model(body.model)
    note_ignored(request, body.refuse(REFUSED_IN_COMPLETIONS))
    generation = (await completions.prepare(context, model, body)).generation
    pairs = zip(generation.prompts, generation.params, strict=True)
    return json_response(RenderedPrompts(data=[_rendered(generation, ids, params) for ids, params in pairs]))


def _rendered(answer: Conversation | Generation, token_ids: list[int], params: SamplingParams) -> RenderedPrompt:
    values = msgspec.structs.asdict(params)
    del values["output_kind"]  # how the engine talks to this server
    prompt = answer.tokenizer.decode(token_ids, skip_special_tokens=False)
    return RenderedPrompt(
        request_id=answer.id, model=answer.model, prompt=prompt, token_ids=token_ids, sampling_params=values
    )
