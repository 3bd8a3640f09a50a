"""The requests of /v1/messages, and how they become chat requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from octavo.entrypoints.api.shared.shapes import (
    PASSED_ON,
    ChatRequest,
    Messages,
    Parts,
    StopStrings,
    refuse_fields,
    unknown_fields,
)
from octavo.entrypoints.api.shared.translate import chat_request
from octavo.entrypoints.chat.prompt_map import Breakpoint, Marks, check_number, read_ttl
from octavo.exceptions import ValidationError

# field -> why; None and the values in INERT ask for nothing
REFUSED = {
    "container": "there are no containers here",
    "context_management": "nothing is compacted here; send the messages that matter",
    "mcp_servers": "the server calls no tools; connect them in the client",
}
INERT: tuple[Any, ...] = (None, [], {})
# accepted without effect
IGNORED = frozenset(
    {"betas", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"} | {"user_profile_id", "workspace_id"}
)
TAKEN = (*PASSED_ON, "return_cache_report")
NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
}


class Block(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Parts[TextBlock] | None = None
    is_error: bool | None = None


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _kind,
        custom_error_type="block_type",
        custom_error_message="content blocks must be of type text, thinking, tool_use or tool_result",
    ),
]


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["user", "assistant", "system"]
    content: str | Parts[ContentBlock]


class Tool(BaseModel):
    """``type`` is checked by hand: Anthropic's own tools are not served here."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    messages: Messages[Message]
    system: str | Parts[TextBlock] | None = None
    tools: Messages[Tool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def ignored(self, *, budget: bool) -> list[str]:
        """The fields that are not known, here or where messages are made; ``budget`` as in :func:`to_chat`."""
        known = IGNORED.union(REFUSED, TAKEN, {"cache_control"}, MessagesRequest.model_fields)
        found = unknown_fields(self, known, ("output_config", "thinking", "tool_choice"))
        if self.thinking is not None and self.thinking.budget_tokens is not None and not budget:
            found.append("thinking.budget_tokens")
        return found


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None


def to_chat(request: CountTokensRequest, *, budget: bool = False) -> ChatRequest:
    """The chat request with the same meaning; ``budget``: the model can be held to ``thinking.budget_tokens``.

    Raises ValidationError under the client's field names.
    """
    extra = request.model_extra or {}
    refuse_fields(request, REFUSED, INERT)
    messages = read_messages(request).messages
    prefilled = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice, config = request.tool_choice, request.output_config
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": True if prefilled else None,
        "add_generation_prompt": False if prefilled else None,
        "tools": _tools(request) or None,
        "tool_choice": _tool_choice(choice) if choice else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(config) if config else None,
        "reasoning_effort": config.effort if config else None,
    }
    if request.thinking is not None and request.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    if request.thinking is not None and request.thinking.display == "omitted":
        fields["include_reasoning"] = False
    if budget and request.thinking is not None:
        fields["thinking_token_budget"] = request.thinking.budget_tokens
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **{name: extra.get(name) for name in TAKEN},
        }
    return chat_request(fields, NAMES)


def _response_format(config: OutputConfig) -> dict[str, Any] | None:
    if config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.schema_, "strict": True}}


def _tools(request: CountTokensRequest) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(request.tools or []):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            what = f"type {tool.type[:40]!r}" if tool.type not in (None, "custom") else "no input_schema"
            raise ValidationError(
                f"tools[{index}] has {what}; only tools of type 'custom', with an input_schema, are served here",
                parameter="tools",
            )
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return tools


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise ValidationError("tool_choice of type tool needs a name", parameter="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


@dataclass
class Transcript:
    """Chat messages: the system prompt first, a message of role tool for each tool_result.

    ``names``: what the client calls each of them; ``breakpoints``: what ``cache_control`` asks for, in its order.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)

    def add(self, message: dict[str, Any], name: str) -> None:
        self.messages.append(message)
        self.names.append(name)

    def mark(self, value: Any, where: str, *, inside: bool = False) -> None:
        """A ``cache_control`` (or None): up to the end of the last message, or of what is ``inside`` it so far."""
        ttl = read_ttl(value, where + ".cache_control" if where else "cache_control")
        if ttl is not None:
            end = len(self.messages[-1]["content"]) if inside else None
            self.breakpoints.append(Breakpoint(len(self.messages) - 1, end, ttl))

    def marks(self) -> Marks:
        """Raises ValidationError for too many breakpoints."""
        check_number(self.breakpoints)
        return Marks(self.breakpoints, self.names)


def read_messages(request: CountTokensRequest) -> Transcript:
    """Raises ValidationError."""
    said = Transcript()
    if request.system:
        said.add({"role": "system", "content": _text(request.system)}, "system")
        length = 0
        for number, block in enumerate(request.system if isinstance(request.system, list) else ()):
            length += len(block.text) + (number > 0)
            ttl = read_ttl(_control(block), f"system[{number}].cache_control")
            if ttl is not None:
                said.breakpoints.append(Breakpoint(0, length, ttl))
    if not request.messages:
        raise ValidationError("messages must not be empty", parameter="messages")
    for index, message in enumerate(request.messages):
        name = f"messages[{index}]"
        if isinstance(message.content, str):
            said.add({"role": message.role, "content": message.content}, name)
        elif message.role == "assistant":
            _assistant(message.content, name, said)
        else:
            _said(message.role, message.content, name, said)
    for index, tool in enumerate(request.tools or ()):
        ttl = read_ttl(_control(tool), f"tools[{index}].cache_control")
        if ttl is not None:  # templates write tools behind the system prompt, or before the first message
            said.breakpoints.append(Breakpoint(0, None if request.system else 0, ttl))
    said.mark((request.model_extra or {}).get("cache_control"), "")
    return said


def _control(block: BaseModel) -> Any:
    return (block.model_extra or {}).get("cache_control")


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _misplaced(name: str, role: str, block: Block) -> ValidationError:
    kind = getattr(block, "type", "?")
    return ValidationError(f"{name}: a block of type {kind} cannot be the {role}'s", parameter="messages")


def _assistant(blocks: list[Any], name: str, said: Transcript) -> None:
    """One assistant message: its text, its thinking, its calls."""
    turn: dict[str, Any] = {"role": "assistant"}
    said.add(turn, name)
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            turn["content"] = turn.get("content", "") + block.text
        elif isinstance(block, ThinkingBlock):
            turn["reasoning"] = turn.get("reasoning", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            called = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": called})
        elif not isinstance(block, RedactedThinkingBlock):  # which cannot be read here
            raise _misplaced(name, "assistant", block)
        said.mark(_control(block), f"{name}.content[{number}]", inside=isinstance(block, TextBlock))


def _said(role: str, blocks: list[Any], name: str, said: Transcript) -> None:
    """The messages of a user's turn, in its order: texts in a row are one message, each tool result is one."""
    own: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            if own and own[-1]["role"] == role:
                own[-1]["content"] += "\n" + block.text
            else:
                own.append({"role": role, "content": block.text})
                said.add(own[-1], name)
        elif isinstance(block, ToolResultBlock) and role == "user":
            own.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")})
            said.add(own[-1], name)
        else:
            raise _misplaced(name, role, block)
        said.mark(_control(block), f"{name}.content[{number}]", inside=isinstance(block, TextBlock))
    if not own:
        raise ValidationError(f"{name}: content must not be empty", parameter="messages")
