"""The models as Anthropic's client reads them; it says who it is by the header ``anthropic-version``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request

from octavo.entrypoints.anthropic.answers import ModelInfo, ModelPage
from octavo.entrypoints.server.state import ServedModel


def is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def model_info(model: ServedModel) -> ModelInfo:
    """One served model."""
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
        max_input_tokens=model.engine.info.max_model_len if model.engine is not None else None,
    )


def model_page(models: Sequence[ServedModel]) -> ModelPage:
    """The list of the served models."""
    return ModelPage(data=[model_info(one) for one in models], first_id=models[0].name, last_id=models[-1].name)
