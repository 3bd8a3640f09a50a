"""GET /health and /ping, open to everybody, and /version: answered from the first moment."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import octavo
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import context_of
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.openai.answers import ServerHealth, ServerVersion
from octavo.entrypoints.server.access import STRANGER, Caller
from octavo.exceptions import EngineDeadError, EngineRestartingError

router = APIRouter()

HEALTH = {
    **describe_answer(ServerHealth),
    503: {**describe_answer(ServerHealth)[200], "description": "loading, restarting, draining, or dead"},
}


@router.get("/health", response_class=Response, responses=HEALTH)
async def health(request: Request) -> Response:
    """200 when requests are served; 503 while loading, restarting or draining, and once the engine is dead."""
    context = context_of(request)
    state = context.server
    for model in state.models.values():
        if model.failure is None and model.engine is None:
            return json_response(ServerHealth("loading", phase=model.phase, progress=model.progress), 503)
    if state.draining:
        return json_response(ServerHealth("draining"), 503)
    try:
        for model in state.models.values():
            await model.ready_engine().check_health()
    except EngineRestartingError as error:
        return json_response(ServerHealth("restarting", message=_reason(error, context.caller)), 503)
    except EngineDeadError as error:
        return json_response(ServerHealth("dead", message=_reason(error, context.caller)), 503)
    return json_response(ServerHealth("ok"))


def _reason(error: EngineDeadError, caller: Caller) -> str | None:
    """It may name files of this machine, which a stranger need not know."""
    return None if caller is STRANGER else str(error)


@router.get("/ping", response_class=Response, responses=HEALTH)
async def ping_get(request: Request) -> Response:
    """The same as /health, for platforms that ask here."""
    return await health(request)


@router.post("/ping", response_class=Response, responses=HEALTH)
async def ping_post(request: Request) -> Response:
    """The same as /health, for platforms that ask here."""
    return await health(request)


@router.get("/version", response_class=Response, responses=describe_answer(ServerVersion))
async def get_version() -> Response:
    """The version of octavo."""
    return json_response(ServerVersion(octavo.__version__))
