"""GET /metrics: Prometheus' text format; empty until the engine is ready."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.openai.routing import server_state

router = APIRouter()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Every metric of the engine."""
    engine = server_state(request).engine
    return Response(b"" if engine is None else engine.render_metrics(), media_type=CONTENT_TYPE)
