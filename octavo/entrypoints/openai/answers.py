"""The answers of the OpenAI API, as msgspec structs: cheap to make and to encode, which counts once per token."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class CacheReport(msgspec.Struct, frozen=True):
    """Why no more of the prompt came from the cache: ``reason`` is differs, ends, new, complete or off.

    ``token`` is where, counted from 0; ``message`` the message that it is in, of a conversation.
    """

    reason: str
    cached_tokens: int
    token: int | None
    message: str | None
    detail: str


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_report: CacheReport | UnsetType = UNSET  # on request


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """``completion_tokens_details`` is there for models that can think."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class RequestTimes(msgspec.Struct, frozen=True):
    """vLLM's per-request metrics: milliseconds, and output tokens per second of generation. None: not reached.

    ``time_to_first_token_ms`` counts from arrival, ``generation_time_ms`` from the first token to the last,
    ``queue_time_ms`` until the first scheduling; ``mean_itl_ms`` is the mean time between two tokens.
    """

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(msgspec.Struct, frozen=True):
    name: str | UnsetType
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call, or (with ``index``) a piece of one in a chunk."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    usage: Usage
    metrics: RequestTimes | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Whole answers and chunks alike; a chunk has no usage unless asked for."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType | None = UNSET


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI dropped it, vLLM's clients still read it. Nobody may fine-tune here."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that requests can name."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int | None
    tool_call_parser: str | None = None  # how tool calls are read; None: not at all
    reasoning_parser: str | None = None
    permission: list[ModelPermission]
    default_sampling_params: dict[str, float]  # of requests that bring none


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models of this server."""

    object: str = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would have the model continue, and how. ``sampling_params`` has all values in force."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any]


class RenderedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """One for each prompt of a completions request."""

    object: str = "list"
    data: list[RenderedPrompt]


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
