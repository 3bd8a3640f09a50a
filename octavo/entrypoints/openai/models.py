"""GET /v1/models: what this server serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from octavo.entrypoints.openai.routing import server_state
from octavo.entrypoints.state import ServerState

router = APIRouter()


def _card(state: ServerState) -> dict[str, Any]:
    limit = state.engine.info.max_model_len if state.engine is not None else None
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.model_name,
        "parent": None,
        "max_model_len": limit,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model; ``max_model_len`` is null while it loads."""
    return {"object": "list", "data": [_card(server_state(request))]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """One model, by the id that requests use."""
    state = server_state(request)
    state.check_model(name)
    return _card(state)
