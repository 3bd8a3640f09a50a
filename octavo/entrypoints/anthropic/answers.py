"""What /v1/messages sends: the message, its blocks, and its events, with Anthropic's names."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` are those that were computed: what came from the cache is counted beside them."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # nothing is charged for
    cache_read_input_tokens: int
    output_tokens: int


class TextContent(msgspec.Struct):
    type: str = "text"
    text: str = ""


class ThinkingContent(msgspec.Struct):
    type: str = "thinking"
    thinking: str = ""
    signature: str = ""  # nothing here checks one


class ToolUseContent(msgspec.Struct, kw_only=True):
    type: str = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


Content = TextContent | ThinkingContent | ToolUseContent


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Any]  # TextContent, ThinkingContent, ToolUseContent
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(msgspec.Struct, frozen=True):
    """How many tokens the model would read."""

    input_tokens: int


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a block grows by; which field it has depends on ``type``."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: str | None
    stop_sequence: str | None


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; which fields it has depends on ``type``."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Any | UnsetType = UNSET
    delta: BlockDelta | StopDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
