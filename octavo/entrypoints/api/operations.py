"""Routes for those who run the server: is it well, how busy, which version, its metrics; and ending a request."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import octavo
from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, context_of
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.server.access import STRANGER, Caller
from octavo.entrypoints.server.state import UnknownRequestError
from octavo.exceptions import EngineDeadError, EngineRestartingError

router = APIRouter()

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format
METRICS: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


class AbortedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``aborted`` answers were running under ``id``, and are no more."""

    id: str
    object: str = "request.aborted"
    aborted: int


class ServerLoad(msgspec.Struct, frozen=True):
    """Requests being answered, and the sequences they came to in the engine."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int


class ServerHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """``status`` is ok, loading, restarting, draining or dead."""

    status: str
    phase: str | None = None
    progress: float | None = None
    message: str | None = None


class ServerVersion(msgspec.Struct, frozen=True):
    """The version of octavo."""

    version: str


HEALTH = {
    **describe_answer(ServerHealth),
    503: {**describe_answer(ServerHealth)[200], "description": "loading, restarting, draining, or dead"},
}
API = Api(router, (AbortedRequest, ServerHealth, ServerLoad, ServerVersion), OPENAI)


@router.delete("/v1/requests/{request_id:path}", response_class=Response, responses=describe_answer(AbortedRequest))
async def abort_request(request_id: str, request: Request) -> Response:
    """Abort what is running under an id: that of the response, or the client's own request_id or X-Request-Id.

    Streams and whole answers then end with finish_reason ``abort`` and what they have. Clients may give several
    requests one id: all of them are aborted. Only the key that sent a request, and the administrator's, can abort it.
    """
    state = context_of(request).server
    state.model()
    aborted = await state.running.abort(request_id, context_of(request).caller)
    if not aborted:
        raise UnknownRequestError(f"no running request has the id {request_id[:200]!r}")
    return json_response(AbortedRequest(id=request_id, aborted=aborted))


@router.get("/load", response_class=Response, responses=describe_answer(ServerLoad))
async def server_load(request: Request) -> Response:
    """How much this server is doing. All zero while it loads."""
    state = context_of(request).server
    engines = [model.engine for model in state.models.values() if model.engine is not None]
    running, waiting = sum(one.num_running for one in engines), sum(one.num_waiting for one in engines)
    return json_response(ServerLoad(state.running.count, running, waiting))


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


@router.get("/metrics", response_class=Response, responses=METRICS)
async def metrics(request: Request) -> Response:
    """Every metric of the default model's engine."""
    engine = context_of(request).server.default.engine
    return Response(b"" if engine is None else engine.render_metrics(), media_type=METRICS_TYPE)
