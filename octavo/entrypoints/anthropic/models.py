"""The models as Anthropic's client reads them; it says who it is by the header ``anthropic-version``."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request

from octavo.entrypoints.anthropic.answers import ModelInfo, ModelPage
from octavo.entrypoints.state import ServerState


def is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def model_info(state: ServerState) -> ModelInfo:
    """The served model."""
    return ModelInfo(
        id=state.model_name,
        display_name=state.model_name,
        created_at=datetime.fromtimestamp(state.created, UTC).isoformat(),
        max_input_tokens=state.engine.info.max_model_len if state.engine is not None else None,
    )


def model_page(state: ServerState) -> ModelPage:
    """The list of the served model."""
    return ModelPage(data=[model_info(state)], first_id=state.model_name, last_id=state.model_name)
