"""From a request's message to the one that templates know: roles, content parts, calls, reasoning."""

from __future__ import annotations

import json
from typing import Any

from octavo.entrypoints.chat.chat_format import ChatFormat
from octavo.entrypoints.openai.protocol import ChatMessage
from octavo.entrypoints.openai.tools import PastToolCall
from octavo.exceptions import ValidationError


def plain_message(index: int, message: ChatMessage, chat_format: ChatFormat) -> dict[str, Any]:
    """Message ``index`` for the template. Raises ValidationError for content that is not text.

    ``developer`` is ``system``. Text parts are joined by newlines unless the template takes parts. Arguments of calls
    are objects, or text where the template wants that; what is no JSON stays the text that it is.
    """
    role = "system" if message.role == "developer" else message.role
    plain = {**(message.model_extra or {}), "role": role, "content": _content(index, message, chat_format)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, chat_format) for call in message.tool_calls]
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates know it by either name
    return plain


def _content(index: int, message: ChatMessage, chat_format: ChatFormat) -> Any:
    content = message.content
    if not isinstance(content, list):
        text = content or ""
        return text if chat_format.takes_text else [{"type": "text", "text": text}]
    texts = []
    for part in content:
        if part.type != "text" or part.text is None:
            raise ValidationError(
                f"messages[{index}]: content parts of type {part.type[:40]!r} are not supported; only text is",
                parameter="messages",
            )
        texts.append(part.text)
    return [{"type": "text", "text": text} for text in texts] if chat_format.takes_parts else "\n".join(texts)


def _call(call: PastToolCall, chat_format: ChatFormat) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if chat_format.arguments_as_text:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = call.function.arguments
    function = {**(call.function.model_extra or {}), "name": call.function.name, "arguments": arguments}
    extra = {} if call.id is None else {"id": call.id}
    return {**(call.model_extra or {}), **extra, "type": call.type, "function": function}
