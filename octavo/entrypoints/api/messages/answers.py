"""What /v1/messages sends: the message, its blocks, its events and errors, with Anthropic's names.

Every struct with a tag says what it is in ``type``, its first field on the wire. MessageBuilder turns the events of a
conversation into blocks that open, grow and close, and the events that say so:

    message_start  ping
    content_block_start  content_block_delta ...  content_block_stop     for each block
    message_delta  message_stop

An answer that is not streamed is what the same builder has at the end, so the two can never differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic_core import from_json

from octavo.entrypoints.chat.conversation import ChatEvent, Conversation
from octavo.entrypoints.chat.generation import CacheReport
from octavo.entrypoints.chat.parsers.base import Delta, Reasoning, ToolCallDelta
from octavo.entrypoints.chat.prompt_map import TTLS
from octavo.entrypoints.http.context import HEADER, Dialect

PATH = "/v1/messages"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


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


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


def error_body(status: int, message: str, param: str | None, request_id: str | None) -> bytes:
    """The JSON body of an error with HTTP ``status``; the message has to name the parameter."""
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(AnthropicErrorBody(error=AnthropicErrorDetail(kind, message), request_id=request_id))


ANTHROPIC = Dialect(error_body, AnthropicErrorBody, id_headers=(HEADER, b"request-id"))


class MessageBuilder:
    """One message on its way. ``max_tokens`` is what the client asked for, which the context may not have room for.

    An event holds the live message: encode it before asking for the next one.
    """

    def __init__(self, conversation: Conversation, max_tokens: int) -> None:
        self._generation, self._max_tokens = conversation.generation, max_tokens
        self._blocks: list[Content] = []
        self._open = False
        self._call: int | None = None  # the index of the call that is open
        self._arguments = ""
        self._stop = StopDelta(None, None)

    def start(self) -> Iterator[Struct]:
        yield MessageStart(self.whole())
        yield Ping()

    def feed(self, news: ChatEvent) -> Iterator[Struct]:
        """The events of ``news``."""
        for delta in news.deltas:
            yield from self._grow(delta)
        if news.finish_reason is not None:
            if not self._blocks:  # an empty answer still has a block
                yield from self._open_block(TextContent())
            yield from self._close()
            self._stop = self._stopped(news)

    def finish(self) -> Iterator[Struct]:
        yield MessageDelta(self._stop, self._usage())
        yield MessageStop()

    def whole(self) -> MessageAnswer:
        """The message as it stands."""
        return MessageAnswer(
            id=self._generation.id,
            model=self._generation.model,
            content=self._blocks,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(),
        )

    def _stopped(self, news: ChatEvent) -> StopDelta:
        """Anthropic's reason; what it has no word for (abort, repetition) keeps its own."""
        reason = news.finish_reason or ""
        if reason == "stop" and isinstance(news.stop_reason, str):
            return StopDelta("stop_sequence", news.stop_reason)
        if reason == "stop" and isinstance(self._blocks[-1], ToolUseContent):  # chat ends a call by name with stop
            reason = "tool_calls"
        if reason == "length" and self._generation.counter.completion_tokens < self._max_tokens:
            return StopDelta("model_context_window_exceeded", None)
        return StopDelta(STOP_REASONS.get(reason, reason), None)

    def _usage(self) -> MessageUsage:
        counter = self._generation.counter
        cached = counter.cached_tokens
        creation = self._creation(cached)
        return MessageUsage(
            input_tokens=counter.prompt_tokens - cached - creation.total,
            cache_creation_input_tokens=creation.total,
            cache_creation=creation,
            cache_read_input_tokens=cached,
            output_tokens=counter.completion_tokens,
            cache_report=UNSET if counter.cache_report is None else counter.cache_report,
        )

    def _creation(self, cached: int) -> CacheCreation:
        """The tokens up to the last pin that were not ``cached``, each counted by the first pin that it is under."""
        tokens, done = dict.fromkeys(TTLS.values(), 0), cached
        for end, ttl in ((pin.num_tokens, pin.ttl) for pin in self._generation.cache.pins):
            kept = min(end, self._generation.counter.num_pinned_tokens)
            tokens[ttl] += max(0, kept - done)
            done = max(done, kept)
        return CacheCreation(ephemeral_5m_input_tokens=tokens[TTLS["5m"]], ephemeral_1h_input_tokens=tokens[TTLS["1h"]])

    # ---- blocks

    def _grow(self, delta: Delta) -> Iterator[Struct]:
        """Add ``delta`` to the open block, after closing one of another kind and opening its own where needed."""
        if isinstance(delta, ToolCallDelta):
            if not self._open or self._call != delta.index:
                yield from self._close()
                identity = delta.id or f"toolu_{uuid.uuid4().hex}"
                yield from self._open_block(ToolUseContent(id=identity, name=delta.name or ""))
                self._call, self._arguments = delta.index, ""
            self._arguments += delta.arguments
            if delta.arguments:
                yield self._delta(InputJsonDelta(delta.arguments))
        else:
            kind = ThinkingContent if isinstance(delta, Reasoning) else TextContent
            if not self._open or not isinstance(self._blocks[-1], kind):
                yield from self._close()
                yield from self._open_block(kind())
            block = self._blocks[-1]
            if isinstance(block, ThinkingContent):
                block.thinking += delta.text
                yield self._delta(ThinkingDelta(delta.text))
            else:
                assert isinstance(block, TextContent)
                block.text += delta.text
                yield self._delta(TextDelta(delta.text))

    def _open_block(self, block: Content) -> Iterator[Struct]:
        self._blocks.append(block)
        self._open = True
        yield ContentBlockStart(len(self._blocks) - 1, block)

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> ContentBlockDelta:
        return ContentBlockDelta(len(self._blocks) - 1, delta)

    def _close(self) -> Iterator[Struct]:
        """Close the block that is open, if any."""
        if not self._open:
            return
        block = self._blocks[-1]
        if isinstance(block, ThinkingContent):
            yield self._delta(SignatureDelta(block.signature))
        elif isinstance(block, ToolUseContent):
            block.input = _object(self._arguments)
        self._open, self._call = False, None
        yield ContentBlockStop(len(self._blocks) - 1)


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; of a call that was cut off, as far as they went."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
