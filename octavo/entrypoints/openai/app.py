"""The HTTP application: routers, error bodies and guards put together. Starts nothing."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import octavo
from octavo.config import ServerConfig
from octavo.entrypoints import cache_admin, health, metrics_endpoint
from octavo.entrypoints.access_log import AccessLog
from octavo.entrypoints.anthropic import messages
from octavo.entrypoints.hosts import HostGuard, host_names
from octavo.entrypoints.openai import chat, completions, models, render, requests, tokenize
from octavo.entrypoints.openai.body_budget import BodyBudget
from octavo.entrypoints.openai.deadlines import TimeoutHeader
from octavo.entrypoints.openai.draining import DrainGuard
from octavo.entrypoints.openai.errors import AnthropicErrorBody, ErrorBody, install_error_handlers
from octavo.entrypoints.openai.middleware import ErrorShield, HeadAsGet, KeyGuard, RequestLimits, RootPath
from octavo.entrypoints.openai.openapi import failures, install_openapi
from octavo.entrypoints.openai.responses import router as responses
from octavo.entrypoints.openai.routing import IGNORED_FIELDS
from octavo.entrypoints.request_ids import RequestIds
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.tenants import TenantHeader

ROUTERS = (
    *(chat.router, completions.router, responses.router, models.router, render.router),
    *(tokenize.router, requests.router, cache_admin.router, health.router, metrics_endpoint.router),
)


BODIES_KEPT = 32  # of the largest size
OPEN_PATHS = frozenset({"/health", "/ping"})  # no key, ever: platforms ask whether the server lives


def build_app(state: ServerState) -> FastAPI:
    """The application over ``state``, which may become ready later."""
    config = state.config
    app = FastAPI(
        title="octavo",
        version=octavo.__version__,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        docs_url="/docs" if config.enable_docs_page else None,
        redoc_url="/redoc" if config.enable_docs_page else None,
        redirect_slashes=False,
    )
    app.state.server, app.state.routers = state, (*ROUTERS, messages.router)
    for router in ROUTERS:
        app.include_router(router, responses=failures(ErrorBody))
    app.include_router(messages.router, responses=failures(AnthropicErrorBody))
    install_error_handlers(app)
    install_openapi(app, guarded=state.keys.guarded, root_path=config.root_path)
    kept = BODIES_KEPT * config.max_body_bytes
    app.add_middleware(BodyBudget, total=kept, share=kept // 4 if state.keys.guarded else kept)
    app.add_middleware(
        KeyGuard, keys=state.keys, open_paths=OPEN_PATHS | ({"/metrics"} if config.public_metrics else set())
    )
    app.add_middleware(
        RequestLimits,
        body=config.max_body_bytes,
        headers=config.h11_max_header_count,
        header_bytes=config.h11_max_incomplete_event_size,
    )
    if config.tenant_header is not None:
        app.add_middleware(TenantHeader, name=config.tenant_header)
    app.add_middleware(TimeoutHeader)
    app.add_middleware(DrainGuard, state=state)
    app.add_middleware(ErrorShield)
    app.add_middleware(HeadAsGet)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, **cross_origin(config))
    app.add_middleware(HostGuard, names=host_names(state))
    if not state.log_config.disable_uvicorn_access_log:
        app.add_middleware(AccessLog, quiet=state.log_config.quiet_paths)
    app.add_middleware(RequestIds, echo=config.enable_request_id_headers)
    app.add_middleware(RootPath, prefix=config.root_path)
    return app


def cross_origin(config: ServerConfig) -> dict[str, Any]:
    """Which pages of other origins may call, and which of our headers they may read."""
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": config.allowed_methods,
        "allow_headers": config.allowed_headers,
        "allow_credentials": config.allow_credentials,
        "expose_headers": ("x-request-id", "retry-after", IGNORED_FIELDS),
    }
