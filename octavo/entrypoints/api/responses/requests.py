"""The requests of /v1/responses, and how they become chat requests.

Fields that would need a store, or another service, are refused with every value that asks for something.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from octavo.entrypoints.api.shared.shapes import (
    PASSED_ON,
    ChatRequest,
    ContentPart,
    Messages,
    Metadata,
    Parts,
    refuse_fields,
    unknown_fields,
)
from octavo.entrypoints.api.shared.translate import chat_request
from octavo.exceptions import ValidationError

# field -> why; None and the values in INERT ask for nothing
REFUSED = {
    "background": "there is no background mode; send the request and wait, or stream",
    "context_management": "nothing is compacted here; send the items that matter",
    "conversation": "conversations are not stored here; send the whole conversation as input",
    "moderation": "there is no moderation here",
    "previous_response_id": "responses are not stored here; send the whole conversation as input",
    "prompt": "there are no stored prompt templates here; send instructions and input",
}
INERT: tuple[Any, ...] = (None, False, [])
# accepted without effect: they say who asks, or speak of stores and services that are not here
IGNORED = frozenset(
    {"access_programs", "background_options", "image", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"}
    | {"prompt_cache_retention", "safety_identifier", "service_tier", "stream_options"}
)
TAKEN = (*PASSED_ON, "skip_special_tokens", "stop", "thinking_token_budget", "top_k")
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}


class InputMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts[ContentPart]


class FunctionCallItem(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts[ContentPart]


class ReasoningItem(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["reasoning"]
    summary: Parts[ContentPart] | None = None
    content: Parts[ContentPart] | None = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="items must be of type message, function_call, function_call_output or reasoning",
    ),
]


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    effort: str | None = None
    summary: str | None = None


class FunctionTool(BaseModel):
    """``type`` is checked by hand: there are two dozen other kinds, none of which is served here."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Messages[dict[str, Any]] | None = None


class InputRequest(BaseModel):
    """What makes the prompt: all of POST /v1/responses/input_tokens."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    input: str | Messages[InputItem]
    instructions: str | None = None
    tools: Messages[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["disabled", "auto"] | None = None

    def unknown(self) -> list[str]:
        """The fields that are not known, here or where responses are made."""
        known = IGNORED.union(REFUSED, TAKEN, ResponsesRequest.model_fields)
        return unknown_fields(self, known, ("reasoning", "text", "tool_choice"))


class ResponsesRequest(InputRequest):
    """POST /v1/responses."""

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Annotated[list[str], Field(max_length=32)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    stream: bool | None = False
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or [])


def to_chat(request: InputRequest) -> ChatRequest:
    """The chat request with the same meaning. Raises ValidationError under the client's field names."""
    extra = request.model_extra or {}
    refuse_fields(request, REFUSED, INERT)
    if request.truncation == "auto":
        raise ValidationError(
            "truncation 'auto' is not supported: no item is dropped behind your back; send what fits",
            parameter="truncation",
        )
    tools, choice = _tools(request)
    fields: dict[str, Any] = {
        "messages": _messages(request),
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    if isinstance(request, ResponsesRequest):
        fields |= {
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "logprobs": request.wants_logprobs,
            "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
            "stream": request.stream,
            **{name: extra.get(name) for name in TAKEN},
        }
    return chat_request(fields, NAMES)


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None or given.name is None:
        raise ValidationError("text.format of type json_schema needs name and schema", parameter="text")
    named = {"name": given.name, "schema": given.schema_, "strict": given.strict, "description": given.description}
    return {"type": "json_schema", "json_schema": {k: v for k, v in named.items() if v is not None}}


def _tools(request: InputRequest) -> tuple[list[dict[str, Any]], Any]:
    """(tools, tool_choice) as chat has them."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(request.tools or []):
        if tool.type != "function" or tool.name is None:
            what = f"type {tool.type[:40]!r}" if tool.type != "function" else "no name"
            raise ValidationError(
                f"tools[{index}] has {what}; only tools of type 'function', with a name, are served here",
                parameter="tools",
            )
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    choice = request.tool_choice
    if not isinstance(choice, ResponsesToolChoice):
        return tools, choice
    if choice.type == "function":
        return tools, {"type": "function", "function": {"name": choice.name}}
    allowed = {tool.get("name") for tool in choice.tools or []}
    if unknown := sorted(str(name) for name in allowed - {tool["function"]["name"] for tool in tools}):
        raise ValidationError(
            f"tool_choice allows {unknown[0][:100]!r}, which is not in tools", parameter="tool_choice"
        )
    return [tool for tool in tools if tool["function"]["name"] in allowed], choice.mode or "auto"


def _messages(request: InputRequest) -> list[dict[str, Any]]:
    """Chat messages. What the assistant thought, said and called between two other items is one message."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise ValidationError("input must not be empty", parameter="input")
    for index, item in enumerate(request.input):
        if isinstance(item, InputMessage):
            content = _text(item.content, index)
            if item.role == "assistant" and (turn := _open_turn(messages)) and "content" not in turn:
                turn["content"] = content
            else:
                messages.append({"role": item.role, "content": content})
        elif isinstance(item, FunctionCallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, index)})
        elif isinstance(item, FunctionCallItem):
            turn = _open_turn(messages) or _new_turn(messages)
            called = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": called})
        elif thought := _text(item.content or [], index):
            _new_turn(messages)["reasoning"] = thought
    return messages


def _open_turn(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _new_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant"})
    return messages[-1]


TEXTS = ("input_text", "output_text", "text", "reasoning_text")


def _text(content: str | list[ContentPart], index: int) -> str:
    """The text of a message's parts; a refusal reads as what it says."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.text if part.type in TEXTS else None
        if part.type == "refusal":
            text = str((part.model_extra or {}).get("refusal", ""))
        if text is None:
            raise ValidationError(
                f"input[{index}]: content parts of type {part.type[:40]!r} are not supported; only text is",
                parameter="input",
            )
        texts.append(text)
    return "\n".join(texts)
