"""GET /v1/models: what this server serves, in OpenAI's shapes or Anthropic's.

Anthropic's client says who it is by the header ``anthropic-version``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.chat.prompts import chat_formats
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, context_of
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.server.state import ServedModel

router = APIRouter()

ONE_MODEL = {"model": {"operationId": "get_model", "parameters": {"name": "$response.body#/data/0/id"}}}


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI dropped it, vLLM's clients still read it. There is no fine-tuning here."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that requests can name."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int | None
    tool_call_parser: str | None = None  # how tool calls are read; None: not at all
    reasoning_parser: str | None = None
    permission: list[ModelPermission]
    default_sampling_params: dict[str, float]  # of requests that bring none


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models of this server."""

    object: str = "list"
    data: list[ModelCard]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """A model that requests can name."""

    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: str = "active"
    max_input_tokens: int | None


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """All models of this server, on one page."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str


API = Api(router, (ModelCard, ModelInfo, ModelList, ModelPage), OPENAI)


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
        _model_page(models) if _is_anthropic(request) else ModelList(data=[_card(one) for one in models])
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
    return json_response(_model_info(model) if _is_anthropic(request) else _card(model))


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _model_info(model: ServedModel) -> ModelInfo:
    """One served model."""
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
        max_input_tokens=model.engine.info.max_model_len if model.engine is not None else None,
    )


def _model_page(models: Sequence[ServedModel]) -> ModelPage:
    """The list of the served models."""
    return ModelPage(data=[_model_info(one) for one in models], first_id=models[0].name, last_id=models[-1].name)
