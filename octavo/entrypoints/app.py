"""The HTTP application: routers, dialects and guards put together. Starts nothing."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import octavo
from octavo.config import ServerConfig
from octavo.entrypoints.api import cache, chat_completions, completions, models, operations, tokenize
from octavo.entrypoints.api.messages import route as messages
from octavo.entrypoints.api.messages.answers import ANTHROPIC, PATH
from octavo.entrypoints.api.responses import route as responses
from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.http.access_log import AccessLog
from octavo.entrypoints.http.context import Dialect, Front
from octavo.entrypoints.http.errors import install_error_handlers
from octavo.entrypoints.http.guards import (
    BodyBudget,
    DrainGuard,
    ErrorShield,
    HeadAsGet,
    HostGuard,
    KeyGuard,
    RootPath,
    SizeGuard,
    TenantHeader,
    TimeoutHeader,
    host_names,
)
from octavo.entrypoints.http.openapi import failures, install_openapi
from octavo.entrypoints.http.routing import IGNORED_FIELDS
from octavo.entrypoints.server.state import ServerState

# an API's file, and one entry here: that is all of it
APIS = (
    chat_completions.API,
    completions.API,
    responses.API,
    models.API,
    tokenize.API,
    cache.API,
    operations.API,
    messages.API,
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
    app.state.routers = [api.router for api in APIS]
    for api in APIS:
        app.include_router(api.router, responses=failures(api.dialect.error_struct))
    install_error_handlers(app)
    structs = [struct for api in APIS for struct in (*api.answers, api.dialect.error_struct)]
    install_openapi(app, structs, guarded=state.keys.guarded, root_path=config.root_path)
    add_guards(app, state)
    return app


def dialect_of(path: str) -> Dialect:
    """The dialect in which the HTTP layer answers requests for ``path``."""
    return ANTHROPIC if path == PATH or path.startswith(PATH + "/") else OPENAI


def add_guards(app: FastAPI, state: ServerState) -> None:
    """Put the guards around ``app``, the innermost first."""
    config = state.config
    kept = BODIES_KEPT * config.max_body_bytes
    app.add_middleware(BodyBudget, total=kept, share=kept // 4 if state.keys.guarded else kept)
    app.add_middleware(
        KeyGuard, keys=state.keys, open_paths=OPEN_PATHS | ({"/metrics"} if config.public_metrics else set())
    )
    app.add_middleware(
        SizeGuard,
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
    app.add_middleware(Front, state=state, dialect_of=dialect_of)
    app.add_middleware(RootPath, prefix=config.root_path)


def cross_origin(config: ServerConfig) -> dict[str, Any]:
    """Which pages of other origins may call, and which of our headers they may read."""
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": config.allowed_methods,
        "allow_headers": config.allowed_headers,
        "allow_credentials": config.allow_credentials,
        "expose_headers": ("x-request-id", "retry-after", IGNORED_FIELDS),
    }
