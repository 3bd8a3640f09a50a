"""/v1/cache: look at the prefix cache, pin prefixes, and evict, save or restore them. For administrators."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.api.shared.shapes import ChatMessage, Messages, TemplateOptions, TokenIds
from octavo.entrypoints.api.shared.translate import chat_input
from octavo.entrypoints.chat.prompts import chat_token_ids, encode_prompts
from octavo.entrypoints.http.openapi import describe_answer
from octavo.entrypoints.http.routing import Api, JsonRoute, context_of, note_ignored, require_admin
from octavo.entrypoints.http.sse import json_response
from octavo.entrypoints.server.context import RequestContext
from octavo.entrypoints.server.state import NotFoundError
from octavo.exceptions import ValidationError
from octavo.messages import (
    Answer,
    EvictPrefixes,
    ListPrefixes,
    NotFound,
    PinInfo,
    PrefixInfo,
    RemovePin,
    ResetCache,
    RestorePrefix,
    SavePrefixes,
    SetPin,
)
from octavo.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM

router = APIRouter(prefix="/v1/cache", route_class=JsonRoute, dependencies=[Depends(require_admin)])

MAX_LISTED = 1000
PREVIEW_TOKENS = 32  # at either end
MAX_TTL = 30 * 86400.0  # seconds


class UnknownPrefixError(NotFoundError):
    """No cached prefix has this id."""

    parameter = "prefix_id"


class UnknownPinError(NotFoundError):
    """No pin has this id."""

    parameter = "pin_id"


class PromptRequest(TemplateOptions):
    """A prompt: text or token ids, or messages as the chat route would render them."""

    model: str | None = None
    prompt: str | TokenIds | None = None
    messages: Messages[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class PinRequest(PromptRequest):
    """POST /v1/cache/pins: a prompt, or the id of a prefix that is cached."""

    prefix_id: str | None = None
    ttl: float = Field(3600.0, gt=0, le=MAX_TTL)


class SaveRequest(BaseModel):
    """POST /v1/cache/save: the id of a prefix that is cached, or nothing."""

    model_config = ConfigDict(strict=True, extra="allow")
    prefix_id: str | None = None


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix in the block pool: where nothing cached goes on, where cached sequences part, or what is pinned.

    ``hits``: requests that took over at least these blocks. ``preview``: its first and last tokens as text, where asked
    for; null if a ``cache_salt`` keeps it apart.
    """

    id: str
    object: str = "cache.prefix"
    tokens: int
    blocks: int
    blocks_in_use: int
    hits: int
    last_used: float
    salted: bool
    pins: list[str]
    preview: str | UnsetType | None = UNSET


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks_held`` of its ``blocks`` have been computed, and stay. ``tenant``: whose request set it by
    ``cache_control``; null if an administrator did.
    """

    id: str
    object: str = "cache.pin"
    prefix_id: str
    tokens: int
    blocks: int
    blocks_held: int
    tenant: str | None
    expires_at: float


class PinRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """The pin is gone."""

    id: str
    object: str = "cache.pin.deleted"
    deleted: bool = True


class PrefixCache(msgspec.Struct, frozen=True, kw_only=True):
    """The prefixes, most recently used first, and all pins. ``prefixes_total`` counts those that are not listed too."""

    object: str = "cache"
    block_size: int
    blocks_cached: int
    blocks_pinned: int
    blocks_pinned_max: int
    prefixes_total: int
    prefixes: list[CachedPrefix]
    pins: list[Pin]


class BlocksChanged(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks were evicted, are being saved, or are being restored."""

    object: str
    blocks: int


API = Api(router, (BlocksChanged, Pin, PinRemoved, PrefixCache), OPENAI)


@router.get("", response_class=Response, responses=describe_answer(PrefixCache))
async def list_cache(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100, preview: bool = False
) -> Response:
    """What is cached in the block pool, most recently used first, and what is pinned."""
    engine = _engine(request)
    reply = await engine.ask(ListPrefixes(limit, PREVIEW_TOKENS if preview else 0))
    now = time.time()
    return json_response(
        PrefixCache(
            block_size=engine.info.block_size,
            blocks_cached=reply.num_cached_blocks,
            blocks_pinned=reply.num_pinned_blocks,
            blocks_pinned_max=reply.max_pinned_blocks,
            prefixes_total=reply.num_prefixes,
            prefixes=[_prefix(one, now, engine.tokenizer if preview else None) for one in reply.prefixes],
            pins=[_pin(one, now) for one in reply.pins],
        )
    )


@router.post("/pins", response_class=Response, responses=describe_answer(Pin))
async def set_pin(body: PinRequest, request: Request) -> Response:
    """Keep the whole blocks of a prefix for ``ttl`` seconds. Those not computed yet are kept as soon as they are."""
    context = context_of(request)
    note_ignored(request, sorted(body.model_extra or {}))
    given = [name for name in ("prompt", "messages", "prefix_id") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ValidationError("give exactly one of prompt, messages and prefix_id", parameter="prompt")
    if body.prefix_id is not None:
        query = SetPin(body.ttl, prefix=_hash(body.prefix_id))
    else:
        query = SetPin(body.ttl, prompt_token_ids=await _token_ids(context, body), cache_salt=body.cache_salt)
    pin = _found(await _engine(request).ask(query), body.prefix_id)
    return json_response(_pin(pin, time.time()))


@router.delete("/pins/{pin_id}", response_class=Response, responses=describe_answer(PinRemoved))
async def remove_pin(pin_id: str, request: Request) -> Response:
    """Let a pin go: its blocks are ordinary cached ones again."""
    answer = await _engine(request).ask(RemovePin(pin_id))
    if isinstance(answer, NotFound):
        raise UnknownPinError(f"no pin has the id {pin_id[:200]!r}")
    return json_response(PinRemoved(id=pin_id))


@router.delete("/prefixes", response_class=Response, responses=describe_answer(BlocksChanged))
async def evict_all(request: Request) -> Response:
    """Forget all blocks that no request and no pin holds, in the tiers too."""
    evicted = _found(await _engine(request).ask(EvictPrefixes()))
    return json_response(BlocksChanged(object="cache.evicted", blocks=evicted.num_blocks))


@router.delete("/prefixes/{prefix_id}", response_class=Response, responses=describe_answer(BlocksChanged))
async def evict_prefix(prefix_id: str, request: Request) -> Response:
    """Forget a prefix, what follows it, and what only led to it, except what a request or a pin holds."""
    engine = _engine(request)
    evicted = _found(await engine.ask(EvictPrefixes(_hash(prefix_id))), prefix_id)
    return json_response(BlocksChanged(object="cache.evicted", blocks=evicted.num_blocks))


@router.delete("", response_class=Response, responses=describe_answer(BlocksChanged))
async def reset_cache(request: Request) -> Response:
    """Forget everything, pins and tiers too. Running requests go on."""
    cleared = await _engine(request).ask(ResetCache())
    return json_response(BlocksChanged(object="cache.reset", blocks=cleared.num_blocks))


@router.post("/save", response_class=Response, responses=describe_answer(BlocksChanged))
async def save_cache(body: SaveRequest, request: Request) -> Response:
    """Write a prefix, or all that is cached, to the disk tier now."""
    note_ignored(request, sorted(body.model_extra or {}))
    query = SavePrefixes(None if body.prefix_id is None else _hash(body.prefix_id))
    saved = _found(await _engine(request).ask(query), body.prefix_id)
    return json_response(BlocksChanged(object="cache.saved", blocks=saved.num_blocks))


@router.post("/restore", response_class=Response, responses=describe_answer(BlocksChanged))
async def restore_prefix(body: PromptRequest, request: Request) -> Response:
    """Load what the tiers have of a prompt into the block pool."""
    context = context_of(request)
    note_ignored(request, sorted(body.model_extra or {}))
    if (body.prompt is None) == (body.messages is None):
        raise ValidationError("give exactly one of prompt and messages", parameter="prompt")
    query = RestorePrefix(await _token_ids(context, body), body.cache_salt)
    restored = await _engine(request).ask(query)
    return json_response(BlocksChanged(object="cache.restored", blocks=restored.num_blocks))


def _engine(request: Request) -> AsyncLLM:
    """The default model's engine. Raises NotReadyError or EngineDeadError."""
    return context_of(request).server.model().ready_engine()


def _found(answer: Answer | NotFound, prefix_id: str | None = None) -> Answer:
    """``answer``. Raises UnknownPrefixError if the core knows no prefix of that id."""
    if isinstance(answer, NotFound):
        raise UnknownPrefixError(f"no cached prefix has the id {(prefix_id or '')[:200]!r}")
    return answer


async def _token_ids(context: RequestContext, body: PromptRequest) -> list[int]:
    model = context.server.model(body.model)
    engine = model.ready_engine()
    if body.messages is not None:
        special = bool(body.add_special_tokens)
        return await chat_token_ids(model, await chat_input(context, body.messages, body, add_special_tokens=special))
    assert body.prompt is not None
    special, limit = body.add_special_tokens is not False, engine.info.max_model_len
    (token_ids,) = await encode_prompts(
        engine.tokenizer, body.prompt, n=1, add_special_tokens=special, limit=limit, fits=True
    )
    highest = engine.info.vocab_size - 1
    if not all(0 <= token_id <= highest for token_id in token_ids):
        raise ValidationError(f"prompt: token ids must be in [0, {highest}]", parameter="prompt")
    return token_ids


def _hash(prefix_id: str) -> bytes:
    """Raises UnknownPrefixError for what no prefix can have as its id."""
    try:
        return bytes.fromhex(prefix_id)
    except ValueError:
        raise UnknownPrefixError(f"no cached prefix has the id {prefix_id[:200]!r}") from None


def _prefix(info: PrefixInfo, now: float, tokenizer: Tokenizer | None) -> CachedPrefix:
    preview: Any = UNSET
    if tokenizer is not None:
        parts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (info.head, info.tail) if ids]
        gap = " ... " if info.num_tokens > len(info.head) + len(info.tail) else ""
        preview = None if info.salted else gap.join(parts)
    return CachedPrefix(
        id=info.prefix.hex(),
        tokens=info.num_tokens,
        blocks=info.num_blocks,
        blocks_in_use=info.num_used_blocks,
        hits=info.hits,
        last_used=now - info.idle,
        salted=info.salted,
        pins=info.pin_ids,
        preview=preview,
    )


def _pin(info: PinInfo, now: float) -> Pin:
    return Pin(
        id=info.pin_id,
        prefix_id=info.prefix.hex(),
        tokens=info.num_tokens,
        blocks=info.num_blocks,
        blocks_held=info.num_held,
        tenant=info.tenant,
        expires_at=now + info.expires_in,
    )
