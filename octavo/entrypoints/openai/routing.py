"""How a route reads its body and finds the server's state."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.state import ServerState


class JsonRequest(Request):
    """Reads JSON with bounded nesting and no lone surrogates; NaN and Infinity pass, so that validation names them."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=True)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """A route whose body is read by :class:`JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def server_state(request: Request) -> ServerState:
    """The state that ``build_app`` was given."""
    state: ServerState = request.app.state.server
    return state
