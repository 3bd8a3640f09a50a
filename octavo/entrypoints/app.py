"""The HTTP application: routers, dialects and guards put together. Starts nothing."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import octavo
from octavo.config import ServerConfig
from octavo.entrypoints import cache_admin, health, metrics_endpoint
from octavo.entrypoints.anthropic import answers as anthropic_answers
from octavo.entrypoints.anthropic import messages
from octavo.entrypoints.anthropic.errors import ANTHROPIC, PATH, AnthropicErrorBody
from octavo.entrypoints.api.shared.errors import OPENAI, ErrorBody
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
from octavo.entrypoints.openai import answers, cache_answers, chat, completions, models, render, requests, tokenize
from octavo.entrypoints.openai.responses import answers as responses_answers
from octavo.entrypoints.openai.responses import router as responses
from octavo.entrypoints.server.state import ServerState

ROUTERS = (
    *(chat.router, completions.router, responses.router, models.router, render.router),
    *(tokenize.router, requests.router, cache_admin.router, health.router, metrics_endpoint.router),
)
ANSWERS: tuple[Any, ...] = (
    answers.AbortedRequest,
    answers.ChatChunk,
    answers.ChatCompletion,
    answers.Completion,
    answers.Detokenized,
    answers.ModelCard,
    answers.ModelList,
    answers.RenderedPrompt,
    answers.RenderedPrompts,
    answers.ServerHealth,
    answers.ServerLoad,
    answers.ServerVersion,
    answers.Tokenized,
    *(cache_answers.BlocksChanged, cache_answers.Pin, cache_answers.PinRemoved, cache_answers.PrefixCache),
    *(responses_answers.Event, responses_answers.InputTokens, responses_answers.ResponseObject),
    *(anthropic_answers.MessageAnswer, anthropic_answers.TokensCount),
    *(anthropic_answers.ModelInfo, anthropic_answers.ModelPage, *anthropic_answers.EVENTS),
    *(AnthropicErrorBody, ErrorBody),
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
    app.state.routers = (*ROUTERS, messages.router)
    for router in ROUTERS:
        app.include_router(router, responses=failures(ErrorBody))
    app.include_router(messages.router, responses=failures(AnthropicErrorBody))
    install_error_handlers(app)
    install_openapi(app, ANSWERS, guarded=state.keys.guarded, root_path=config.root_path)
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
