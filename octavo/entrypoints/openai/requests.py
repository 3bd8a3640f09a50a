"""DELETE /v1/requests/{id} and GET /load: the requests that are being answered."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import context_of
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.openai.answers import AbortedRequest, ServerLoad
from octavo.entrypoints.server.state import UnknownRequestError

router = APIRouter()


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
