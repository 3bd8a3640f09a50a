"""GET /health, /ping and /version: open to everybody, answered from the first moment."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import octavo
from octavo.entrypoints.openai.routing import server_state
from octavo.exceptions import EngineDeadError

router = APIRouter()


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """200 when requests are served; 503 while loading (with the phase) and after the engine has died."""
    state = server_state(request)
    if state.failure is None and state.engine is None:
        body: dict[str, Any] = {"status": "loading", "phase": state.phase, "progress": state.progress}
        return JSONResponse(body, 503)
    try:
        await state.ready_engine().check_health()
    except EngineDeadError as error:
        return JSONResponse({"status": "dead", "message": str(error)}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ping", response_class=Response)
async def ping_get(request: Request) -> Response:
    """The same as /health, for platforms that ask here."""
    return await health(request)


@router.post("/ping", response_class=Response)
async def ping_post(request: Request) -> Response:
    """The same as /health, for platforms that ask here."""
    return await health(request)


@router.get("/version")
async def get_version() -> dict[str, str]:
    """The version of octavo."""
    return {"version": octavo.__version__}
