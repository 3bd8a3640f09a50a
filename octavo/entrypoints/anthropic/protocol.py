"""The requests of /v1/messages, and how they become chat requests.

``cache_control`` is accepted everywhere and changes nothing: every prefix is cached anyway.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from octavo.entrypoints.openai.bounded import Messages, Parts, StopStrings
from octavo.entrypoints.openai.protocol import ChatRequest, unknown_fields
from octavo.entrypoints.openai.translate import chat_request
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
    {"betas", "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"}
    | {"user_profile_id", "workspace_id"}
)
# sampling fields of vLLM that mean here what they mean in chat
PASSED_ON = (
    *("cache_salt", "chat_template_kwargs", "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens"),
    *("presence_penalty", "priority", "repetition_penalty", "request_id", "seed", "stop_token_ids", "timeout"),
)
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


class ToolChoice(BaseModel):
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
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None

    def ignored(self, *, budget: bool) -> list[str]:
        """The fields that nobody knows; ``budget`` as in :func:`to_chat`."""
        known = IGNORED.union(REFUSED, PASSED_ON)
        found = unknown_fields(self, known, ("output_config", "thinking", "tool_choice"))
        if self.thinking is not None and self.thinking.budget_tokens is not None and not budget:
            found.append("thinking.budget_tokens")
        return found


def to_chat(request: CountTokensRequest, *, budget: bool = False) -> ChatRequest:
    """The chat request with the same meaning; ``budget``: the model can be held to ``thinking.budget_tokens``.

    Raises ValidationError under the client's field names.
    """
    extra = request.model_extra or {}
    for name, reason in REFUSED.items():
        if not any(extra.get(name) is value or extra.get(name) == value for value in INERT):
            raise ValidationError(f"{name} is not supported: {reason}", parameter=name)
    messages = _messages(request)
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
            **{name: extra.get(name) for name in PASSED_ON},
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


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise ValidationError("tool_choice of type tool needs a name", parameter="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Chat messages: the system prompt first, a message of role tool for each tool_result."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    if not request.messages:
        raise ValidationError("messages must not be empty", parameter="messages")
    for index, message in enumerate(request.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, index))
        else:
            messages += _said(message.role, message.content, index)
    return messages


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _misplaced(index: int, role: str, block: Block) -> ValidationError:
    kind = getattr(block, "type", "?")
    return ValidationError(f"messages[{index}]: a block of type {kind} cannot be the {role}'s", parameter="messages")


def _assistant(blocks: list[Any], index: int) -> dict[str, Any]:
    """One assistant message: its text, its thinking, its calls."""
    turn: dict[str, Any] = {"role": "assistant"}
    for block in blocks:
        if isinstance(block, TextBlock):
            turn["content"] = turn.get("content", "") + block.text
        elif isinstance(block, ThinkingBlock):
            turn["reasoning"] = turn.get("reasoning", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            called = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": called})
        elif not isinstance(block, RedactedThinkingBlock):  # nobody here can read those
            raise _misplaced(index, "assistant", block)
    return turn


def _said(role: str, blocks: list[Any], index: int) -> list[dict[str, Any]]:
    """The messages of a user's turn, in its order: texts in a row are one message, each tool result is one."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n" + block.text
            else:
                messages.append({"role": role, "content": block.text})
        elif isinstance(block, ToolResultBlock) and role == "user":
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
            messages.append(result)
        else:
            raise _misplaced(index, role, block)
    if not messages:
        raise ValidationError(f"messages[{index}]: content must not be empty", parameter="messages")
    return messages
