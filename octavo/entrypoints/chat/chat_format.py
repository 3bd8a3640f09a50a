"""What a chat template can do, found by trying it, and how the model's text is therefore read.

Nothing is configured: the template is rendered with small conversations, and what comes out tells whether it takes
tools, how it wants calls and content parts, and which of the known formats it asks the model to write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from octavo.config import ChatConfig
from octavo.entrypoints.chat.parsers.formats import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    reasoning_parser_for,
    tool_format,
    tool_parser_for,
)
from octavo.exceptions import ConfigError, ValidationError
from octavo.tokenizer.base import Tokenizer

PROBE = "octavo_probe"
PROBE_SECONDS = 0.5  # a template that takes longer over two lines of chat is no honest one
USER = {"role": "user", "content": PROBE}
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": PROBE,
        "parameters": {"type": "object", "properties": {"octavo_key": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class ChatFormat:
    """All that the chat routes know of a template. ``template`` is None where the model's own is used.

    ``call_tags`` and ``think_tags`` are the ids of those tags that the vocabulary has as special tokens;
    ``think_start`` and ``think_end`` the ids of the tokens around the thinking, where each is one token.
    """

    template: str | None = None
    takes_tools: bool = False
    arguments_as_text: bool = False
    takes_parts: bool = False
    takes_text: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    call_tags: tuple[int, ...] = ()
    think_tags: tuple[int, ...] = ()
    think_start: int | None = None
    think_end: int | None = None
    text: str = ""  # the template, and what it made of tools and calls


def detect(tokenizer: Tokenizer, config: ChatConfig, template: str | None = None) -> ChatFormat:
    """The format of ``template``, of the configured one, or of the model's own.

    Raises ConfigError for the name of a parser that does not exist.
    """
    if template is None:
        template = read_template(config.chat_template)
    probe = _Probe(tokenizer, template)
    text = (template or tokenizer.chat_template or "") + "\n" + probe.shown
    tool_name = _choose(config.tool_call_parser, tool_parser_for(text) if probe.takes_tools else None)
    reasoning_name = _choose(config.reasoning_parser, reasoning_parser_for(text))
    tools = None if tool_name is None else tool_format(tool_name)
    reasoning = None if reasoning_name is None else reasoning_format(reasoning_name)
    parts = {"auto": probe.takes_parts, "string": False, "openai": True}[config.chat_template_content_format]
    return ChatFormat(
        template=template,
        takes_tools=probe.takes_tools,
        arguments_as_text=probe.arguments_as_text,
        takes_parts=parts,
        takes_text=probe.takes_text or not parts,
        tool_parser=tool_name,
        reasoning_parser=reasoning_name,
        tools=tools,
        reasoning=reasoning,
        call_tags=_special_ids(tokenizer, tools.tags if tools else ()),
        think_tags=_special_ids(tokenizer, (reasoning.open, reasoning.close) if reasoning else ()),
        think_start=_single_id(tokenizer, reasoning.open) if reasoning else None,
        think_end=_single_id(tokenizer, reasoning.close) if reasoning else None,
        text=text,
    )


def read_template(given: str | None) -> str | None:
    """``given`` may be a file's name or a template. Raises ConfigError."""
    if given is None or (not os.path.exists(given) and ("{{" in given or "{%" in given)):
        return given
    try:
        with open(given, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template = {given!r}: {error}") from error


def _choose(configured: str, detected: str | None) -> str | None:
    if configured == "auto":
        return detected
    return None if configured == "none" else configured


def _single_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the one token that spells ``text``."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _special_ids(tokenizer: Tokenizer, tags: Sequence[str]) -> tuple[int, ...]:
    ids = (_single_id(tokenizer, tag) for tag in tags)
    return tuple(i for i in ids if i is not None and i in tokenizer.special_token_ids)


class _Probe:
    """What came of rendering."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._spent = 0.0
        tools = self._render([USER], tools=[TOOL])
        self.takes_tools = tools.count(PROBE) > self._render([USER]).count(PROBE)
        calls = self._render_call({"octavo_key": "octavo_value"})
        # a template that wants text shows an object as Python does, or fails on it
        self.arguments_as_text = (not calls or "'octavo_key'" in calls) and bool(
            self._render_call('{"octavo_key": "octavo_value"}')
        )
        parts = self._render([{"role": "user", "content": [{"type": "text", "text": PROBE}]}])
        self.takes_parts = PROBE in parts and "'text'" not in parts and '"text"' not in parts
        self.takes_text = PROBE in self._render([USER])
        self.shown = tools + calls

    def _render_call(self, arguments: Any) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": PROBE, "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call00001", "name": PROBE, "content": PROBE}
        return self._render([USER, said, result], tools=[TOOL])

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Empty where the template refuses, and once it has taken PROBE_SECONDS of CPU time in all."""
        if self._spent > PROBE_SECONDS:
            return ""
        started = time.thread_time()
        try:
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, chat_template=self._template, **options
            )
        except ValidationError:
            return ""
        finally:
            self._spent += time.thread_time() - started


class ChatFormats:
    """The formats of one server: the served one, and those of templates that requests bring."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig) -> None:
        """Raises ConfigError for the name of a parser that does not exist, and for a template that cannot be read."""
        self.config = config
        self.default = detect(tokenizer, config)
        self._detected = lru_cache(maxsize=16)(lambda template: detect(tokenizer, config, template))

    def choose(self, template: str | None) -> ChatFormat:
        """The format for a request. Raises ValidationError for a template of its own unless those are trusted."""
        if template is None:
            return self.default
        if not self.config.trust_request_chat_template:
            raise ValidationError(
                "chat_template is not allowed in requests; the server's flag --trust-request-chat-template allows it",
                parameter="chat_template",
            )
        found: ChatFormat = self._detected(template)
        return found
