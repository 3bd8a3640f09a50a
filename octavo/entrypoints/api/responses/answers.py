"""What /v1/responses sends: the response, its items, and its events, with OpenAI's names.

ResponseBuilder turns the events of a conversation into items that open, grow and close, and the events that say so:

    message    item.added  part.added  text.delta ...       text.done       part.done  item.done
    reasoning  item.added  part.added  reasoning.delta ...  reasoning.done  part.done  item.done
    call       item.added              arguments.delta ...  arguments.done             item.done

An answer that is not streamed is what the same builder has at the end, so the two can never differ.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.entrypoints.api.shared.logprobs import chat_logprobs
from octavo.entrypoints.chat.conversation import ChatEvent, Conversation
from octavo.entrypoints.chat.parsers.base import Content, Delta, ToolCallDelta

# how a choice ended -> (status, reason); what is not here is complete
ENDINGS = {"length": ("incomplete", "max_output_tokens"), "abort": ("cancelled", None)}


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # nothing is charged for


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A part of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A part of a reasoning item."""

    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText]


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """One response: what was asked, what came of it. ``store`` is always false: it is not kept."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class InputTokens(msgspec.Struct, frozen=True):
    """How many tokens the model would read."""

    input_tokens: int
    object: str = "response.input_tokens"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; which fields it has depends on ``type``."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputMessage | OutputReasoning | OutputFunctionCall | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ResponseBuilder:
    """One response on its way. ``echo`` has the request's fields that a response repeats.

    An event holds the live item: encode it before asking for the next one.
    """

    def __init__(self, conversation: Conversation, echo: dict[str, Any]) -> None:
        self._conversation, self._generation, self._echo = conversation, conversation.generation, echo
        self._items: list[OutputItem] = []
        self._open = False  # whether the last item is still growing
        self._call: int | None = None  # the index of the call that is open
        self._logprobs: list[Any] = []  # of tokens whose text is held back
        self._status = "in_progress"
        self._reason: str | None = None
        self._error: ResponseError | None = None
        self._sequence = 0

    def start(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.whole())
        yield self._event("response.in_progress", response=self.whole())

    def feed(self, news: ChatEvent) -> Iterator[Event]:
        """The events of ``news``."""
        self._keep_logprobs(news)
        for delta in news.deltas:
            yield from self._grow(delta)
        if news.finish_reason is not None:
            if not self._items:  # an empty answer is still a message
                yield from self._open_item(_message())
            self._status, self._reason = ENDINGS.get(news.finish_reason, ("completed", None))
            yield from self._close("completed" if self._status == "completed" else "incomplete")

    def finish(self) -> Iterator[Event]:
        """The last event. An aborted response ends like an incomplete one, with status ``cancelled``."""
        kind = "completed" if self._status == "completed" else "incomplete"
        yield self._event(f"response.{kind}", response=self.whole())

    def fail(self, message: str) -> Event:
        """The last event of a response that broke."""
        self._status, self._error = "failed", ResponseError("server_error", message)
        return self._event("response.failed", response=self.whole())

    def whole(self) -> ResponseObject:
        """The response as it stands."""
        ended = self._status != "in_progress"
        return ResponseObject(
            id=self._generation.id,
            created_at=self._generation.created,
            completed_at=int(time.time()) if self._status == "completed" else None,
            status=self._status,
            error=self._error,
            incomplete_details=None if self._reason is None else IncompleteDetails(self._reason),
            model=self._generation.model,
            output=list(self._items) if ended else [],
            usage=self._usage() if ended else None,
            **self._echo,
        )

    # ---- items

    def _grow(self, delta: Delta) -> Iterator[Event]:
        """Add ``delta`` to the open item, after closing one of another kind and opening its own where needed."""
        if isinstance(delta, ToolCallDelta):
            if not self._open or self._call != delta.index:
                yield from self._close()
                yield from self._open_item(_call(delta))
                self._call = delta.index
            yield from self._add(delta.arguments)
        else:
            kind = OutputMessage if isinstance(delta, Content) else OutputReasoning
            if not self._open or not isinstance(self._items[-1], kind):
                yield from self._close()
                yield from self._open_item(_message() if isinstance(delta, Content) else _reasoning())
            yield from self._add(delta.text)

    def _open_item(self, item: OutputItem) -> Iterator[Event]:
        self._items.append(item)
        self._open = True
        yield self._item_event("added")  # announced empty, then its only part
        if isinstance(item, OutputMessage):
            item.content.append(OutputText())
            yield self._part_event("content_part.added", part=item.content[0])
        elif isinstance(item, OutputReasoning):
            item.content.append(ReasoningText())
            yield self._part_event("content_part.added", part=item.content[0])

    def _add(self, text: str) -> Iterator[Event]:
        item = self._items[-1]
        if not text:
            return
        if isinstance(item, OutputFunctionCall):
            item.arguments += text
            yield self._call_event("delta", delta=text)
        elif isinstance(item, OutputReasoning):
            item.content[0].text += text
            yield self._part_event("reasoning_text.delta", delta=text)
        else:
            told, self._logprobs = self._logprobs, []
            item.content[0].text += text
            item.content[0].logprobs += told
            yield self._part_event("output_text.delta", delta=text, logprobs=told)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Close the item that is open, if any."""
        if not self._open:
            return
        self._open, self._call = False, None
        item = self._items[-1]
        item.status = status
        if isinstance(item, OutputFunctionCall):
            yield self._call_event("done", name=item.name, arguments=item.arguments)
        elif isinstance(item, OutputReasoning):
            yield self._part_event("reasoning_text.done", text=item.content[0].text)
            yield self._part_event("content_part.done", part=item.content[0])
        else:
            part = item.content[0]
            part.logprobs += self._logprobs
            self._logprobs = []
            yield self._part_event("output_text.done", text=part.text, logprobs=part.logprobs)
            yield self._part_event("content_part.done", part=part)
        yield self._item_event("done")

    # ---- tokens

    def _keep_logprobs(self, news: ChatEvent) -> None:
        """Keep the logprobs of what is said until its text goes out."""
        if news.logprobs and (not news.deltas or any(isinstance(delta, Content) for delta in news.deltas)):
            top = self._conversation.reply.top_logprobs or 0
            told = chat_logprobs(self._generation.tokenizer, news.token_ids, news.logprobs, top)
            self._logprobs += told.content

    def _usage(self) -> ResponseUsage:
        counter = self._generation.counter
        return ResponseUsage(
            counter.prompt_tokens,
            InputTokensDetails(counter.cached_tokens),
            counter.completion_tokens,
            OutputTokensDetails(counter.reasoning_tokens or 0),
            counter.prompt_tokens + counter.completion_tokens,
        )

    # ---- events

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return Event(type=kind, sequence_number=self._sequence - 1, **fields)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item_event(self, what: str) -> Event:
        return self._event(f"response.output_item.{what}", output_index=self._index, item=self._items[-1])

    def _part_event(self, kind: str, **fields: Any) -> Event:
        item_id = self._items[-1].id
        return self._event(f"response.{kind}", item_id=item_id, output_index=self._index, content_index=0, **fields)

    def _call_event(self, what: str, **fields: Any) -> Event:
        kind = f"response.function_call_arguments.{what}"
        return self._event(kind, item_id=self._items[-1].id, output_index=self._index, **fields)


def _message() -> OutputMessage:
    return OutputMessage(id=f"msg_{uuid.uuid4().hex}", content=[])


def _reasoning() -> OutputReasoning:
    return OutputReasoning(id=f"rs_{uuid.uuid4().hex}", content=[])


def _call(delta: ToolCallDelta) -> OutputFunctionCall:
    identity = uuid.uuid4().hex
    return OutputFunctionCall(id=f"fc_{identity}", call_id=delta.id or f"call_{identity}", name=delta.name or "")
