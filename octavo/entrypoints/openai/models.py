"""GET /v1/models: what this server serves."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.anthropic.answers import ModelInfo, ModelPage
from octavo.entrypoints.anthropic.models import is_anthropic, model_info, model_page
from octavo.entrypoints.openai.answers import ModelCard, ModelList, ModelPermission
from octavo.entrypoints.openai.openapi import describe_answer
from octavo.entrypoints.openai.prompts import chat_formats
from octavo.entrypoints.openai.routing import server_state
from octavo.entrypoints.openai.sse import json_response
from octavo.entrypoints.state import ServerState

router = APIRouter()

ONE_MODEL = {"model": {"operationId": "get_model", "parameters": {"name": "$response.body#/data/0/id"}}}


def _card(state: ServerState) -> ModelCard:
    identity = "modelperm-" + hashlib.sha256(f"{state.model_name} {state.created}".encode()).hexdigest()[:32]
    chat = chat_formats(state).default if state.engine is not None else None
    return ModelCard(
        id=state.model_name,
        created=state.created,
        root=state.model_name,
        max_model_len=state.engine.info.max_model_len if state.engine is not None else None,
        tool_call_parser=chat.tool_parser if chat else None,
        reasoning_parser=chat.reasoning_parser if chat else None,
        permission=[ModelPermission(id=identity, created=state.created)],
        default_sampling_params=state.sampling_defaults,
    )


@router.get("/v1/models", response_class=Response, responses=describe_answer(ModelList | ModelPage, links=ONE_MODEL))
async def list_models(request: Request) -> Response:
    """The served model; ``max_model_len`` is null while it loads."""
    state = server_state(request)
    return json_response(model_page(state) if is_anthropic(request) else ModelList(data=[_card(state)]))


@router.get(
    "/v1/models/{name:path}",
    response_class=Response,
    responses=describe_answer(ModelCard | ModelInfo),
    operation_id="get_model",
)
async def get_model(name: str, request: Request) -> Response:
    """One model, by the id that requests use."""
    state = server_state(request)
    state.check_model(name)
    return json_response(model_info(state) if is_anthropic(request) else _card(state))
