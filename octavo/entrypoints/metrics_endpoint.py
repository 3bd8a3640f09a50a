"""GET /metrics: Prometheus' text format; empty until the engine is ready."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.http.routing import context_of

router = APIRouter()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


TEXT: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=Response, responses=TEXT)
async def metrics(request: Request) -> Response:
    """Every metric of the default model's engine."""
    engine = context_of(request).server.default.engine
    return Response(b"" if engine is None else engine.render_metrics(), media_type=CONTENT_TYPE)
