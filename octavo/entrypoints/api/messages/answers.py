"""What /v1/messages sends: the message, its blocks, and its events, with Anthropic's names.

Every struct with a tag says what it is in ``type``, its first field on the wire.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.entrypoints.chat.prompt_map import CacheReport


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens computed now that ``cache_control`` keeps, by how long."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0

    @property
    def total(self) -> int:
        return self.ephemeral_5m_input_tokens + self.ephemeral_1h_input_tokens


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are the sum of three: read from the cache, computed and kept by ``cache_control``, others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    cache_read_input_tokens: int
    output_tokens: int
    cache_report: CacheReport | UnsetType = UNSET  # on request


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """What is said."""

    text: str = ""


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """What was thought."""

    thinking: str = ""
    signature: str = ""  # nothing here checks one


class ToolUseContent(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any] = {}


Content = TextContent | ThinkingContent | ToolUseContent


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message."""

    id: str
    role: str = "assistant"
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(msgspec.Struct, frozen=True):
    """How many tokens the model would read."""

    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class StopDelta(msgspec.Struct, frozen=True):
    """Why the message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """Says that the server is there."""


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextContent | ThinkingContent | ToolUseContent


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage  # of the whole message


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Nothing comes after it."""


EVENTS: tuple[type[msgspec.Struct], ...] = (
    *(MessageStart, Ping, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop),
)
