"""Configuration of chats: the template, and how the model's text is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.choices import REASONING_PARSERS, TOOL_PARSERS
from octavo.config.option import check_choices, option, require


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How messages become a prompt, and the model's text a message."""

    chat_template: str | None = option(None, "file with a chat template, or the template itself (default: the model's)")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "how the template gets message content: one text, or openai's parts; auto asks the template"
    )
    default_chat_template_kwargs: str | None = option(
        None, "JSON object of variables for the template; chat_template_kwargs of a request go before"
    )
    trust_request_chat_template: bool = option(False, "let requests bring their own chat_template (in the sandbox)")
    response_role: str = option("assistant", "role of the messages that the model writes")
    tool_call_parser: str = option(
        "auto", f"how tool calls are read: {', '.join(TOOL_PARSERS)}, none; auto asks the template"
    )
    reasoning_parser: str = option(
        "auto", f"how reasoning is told from the answer: {', '.join(REASONING_PARSERS)}, none; auto asks the template"
    )
    enable_auto_tool_choice: bool = option(True, "accepted as vLLM's flag; tool_choice auto needs no flag here")
    exclude_tools_when_tool_choice_none: bool = option(
        True, "with tool_choice none, do not show the tools to the model"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require(bool(self.response_role), "response_role", self.response_role, "not empty")
        require(
            self.default_chat_template_kwargs is None or self._is_object(),
            "default_chat_template_kwargs",
            self.default_chat_template_kwargs,
            "a JSON object",
        )

    def _is_object(self) -> bool:
        try:
            return isinstance(json.loads(self.default_chat_template_kwargs or ""), dict)
        except ValueError:
            return False

    @property
    def template_variables(self) -> dict[str, Any]:
        """What ``default_chat_template_kwargs`` holds."""
        found: dict[str, Any] = json.loads(self.default_chat_template_kwargs or "{}")
        return found
