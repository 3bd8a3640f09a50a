"""GET /v1/models: what this server serves."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.anthropic.answers import ModelInfo, ModelPage
from octavo.entrypoints.anthropic.models import is_anthropic, model_info, model_page
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import context_of
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.openai.answers import ModelCard, ModelList, ModelPermission
from octavo.entrypoints.openai.prompts import chat_formats
from octavo.entrypoints.server.state import ServedModel

router = APIRouter()

ONE_MODEL = {"model": {"operationId": "get_model", "parameters": {"name": "$response.body#/data/0/id"}}}


def _card(model: ServedModel) -> ModelCard:
    identity = "modelperm-" + hashlib.sha256(f"{model.name} {model.created}".encode()).hexdigest()[:32]
    chat = chat_formats(model).default if model.engine is not None else None
    return ModelCard(
        id=model.name,
        created=model.created,
        root=model.name,
        max_model_len=model.engine.info.max_model_len if model.engine is not None else None,
        tool_call_parser=chat.tool_parser if chat else None,
        reasoning_parser=chat.reasoning_parser if chat else None,
        permission=[ModelPermission(id=identity, created=model.created)],
        default_sampling_params=model.sampling_defaults,
    )


@router.get("/v1/models", response_class=Response, responses=describe_answer(ModelList | ModelPage, links=ONE_MODEL))
async def list_models(request: Request) -> Response:
    """The served models; ``max_model_len`` is null while one loads."""
    models = list(context_of(request).server.models.values())
    return json_response(
        model_page(models) if is_anthropic(request) else ModelList(data=[_card(one) for one in models])
    )


@router.get(
    "/v1/models/{name:path}",
    response_class=Response,
    responses=describe_answer(ModelCard | ModelInfo),
    operation_id="get_model",
)
async def get_model(name: str, request: Request) -> Response:
    """One model, by the id that requests use."""
    model = context_of(request).server.find(name)
    return json_response(model_info(model) if is_anthropic(request) else _card(model))
