"""The HTTP application: routers, error bodies and guards put together. Starts nothing."""

from __future__ import annotations

from fastapi import FastAPI

import octavo
from octavo.entrypoints import health, metrics_endpoint
from octavo.entrypoints.anthropic import messages
from octavo.entrypoints.openai import chat, completions, models, render, requests, tokenize
from octavo.entrypoints.openai.errors import AnthropicErrorBody, ErrorBody, install_error_handlers
from octavo.entrypoints.openai.middleware import MAX_BODY_BYTES, ApiKeyGuard, BodyLimit, ErrorShield, HeadAsGet
from octavo.entrypoints.openai.openapi import failures, install_openapi
from octavo.entrypoints.openai.responses import router as responses
from octavo.entrypoints.request_ids import RequestIds
from octavo.entrypoints.state import ServerState

ROUTERS = (
    *(chat.router, completions.router, responses.router, models.router, render.router),
    *(tokenize.router, requests.router, health.router, metrics_endpoint.router),
)


def build_app(state: ServerState, *, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application over ``state``, which may become ready later. No CORS headers are sent."""
    app = FastAPI(title="octavo", version=octavo.__version__)
    app.state.server, app.state.routers = state, (*ROUTERS, messages.router)
    for router in ROUTERS:
        app.include_router(router, responses=failures(ErrorBody))
    app.include_router(messages.router, responses=failures(AnthropicErrorBody))
    install_error_handlers(app)
    install_openapi(app, guarded=api_key is not None)
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    if api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=api_key)
    app.add_middleware(ErrorShield)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestIds, echo=state.config.enable_request_id_headers)
    return app
