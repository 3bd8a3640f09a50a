"""The formats in which models think and call tools: what each says of itself, and their table by name.

A format is a grammar to read a message with and, for calls, the texts to demand them with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config.choices import REASONING_PARSERS, TOOL_PARSER_ALIASES, TOOL_PARSERS
from octavo.entrypoints.chat.parsers.base import Parser
from octavo.entrypoints.chat.parsers.cursor import Cursor, Incremental, Step
from octavo.exceptions import ConfigError
from octavo.utils.registry import resolve

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of its parameters


@dataclass(frozen=True)
class CallSyntax:
    """How a model is made to write calls: opening, calls with ``between`` them, closing.

    A call is ``before_name`` NAME ``after_name`` ARGUMENTS ``end``, with the arguments as a JSON object. ``trigger`` is
    how no other text begins, and what every call of a message (or, with an ``opening``, their list) begins with.
    """

    trigger: str
    before_name: str
    after_name: str
    end: str
    between: str
    opening: str = ""
    closing: str = ""


TAGGED_JSON = CallSyntax(  # Hermes' and Qwen's
    trigger="<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    end="}\n</tool_call>",
    between="\n",
)


@dataclass(frozen=True)
class ToolFormat:
    """``tags`` are texts that must reach the parser even where the vocabulary has them as special tokens.

    ``grammar`` reads a message; ``syntax`` says, for a model's chat template, how calls are written.
    """

    tags: tuple[str, ...]
    grammar: Callable[[Cursor, Tools], Step[None]]
    syntax: Callable[[str], CallSyntax]

    def parser(self, tools: Tools) -> Parser:
        """A fresh parser for one message."""
        return Incremental(lambda cursor: self.grammar(cursor, tools))


@dataclass(frozen=True)
class ReasoningFormat:
    """Thinking is between ``open`` and ``close``, and comes before the answer.

    ``grammar`` is told whether the prompt itself has opened the thinking.
    """

    open: str
    close: str
    grammar: Callable[[Cursor, bool], Step[None]]

    def parser(self, opened: bool) -> Parser:
        """A fresh parser for one message."""
        return Incremental(lambda cursor: self.grammar(cursor, opened))

    def opened_by(self, prompt: str, continued: str | None = None) -> bool:
        """Whether the model begins within the thinking: ``prompt`` ends with the opening tag, or the ``continued``
        last message has not closed it."""
        if continued is not None:
            return continued.rfind(self.open) > continued.rfind(self.close)
        return prompt.rstrip().endswith(self.open)


def tool_format(name: str) -> ToolFormat:
    """Raises ConfigError for an unknown name."""
    aliases = {alias: TOOL_PARSERS[known] for alias, known in TOOL_PARSER_ALIASES.items()}
    found = _load("tool_call_parser", name, TOOL_PARSERS | aliases)
    assert isinstance(found, ToolFormat)
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ConfigError for an unknown name."""
    found = _load("reasoning_parser", name, REASONING_PARSERS)
    assert isinstance(found, ReasoningFormat)
    return found


def _load(setting: str, name: str, table: dict[str, str]) -> object:
    if name not in table:
        raise ConfigError(f"{setting} = {name!r}: must be auto, none, or one of {', '.join(table)}")
    found: object = resolve(table[name])
    return found


# What a template writes -> the parser that reads it; the first that matches. A template with one of FOREIGN has a
# format of its own behind a familiar tag.
FOREIGN = ("<arg_key>", "[func_name1(params_name1=", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>")
TOOL_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)


def tool_parser_for(template: str) -> str | None:
    """The name of the parser for what ``template`` makes a model write; None where it shows no known format."""
    if any(mark in template for mark in FOREIGN):
        return None
    return next((name for mark, name in TOOL_MARKS if mark in template), None)


def reasoning_parser_for(template: str) -> str | None:
    """The name of the parser for a template that handles thinking; None where it does not."""
    if "<think>" in template or "</think>" in template:
        return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
    return "mistral" if "[THINK]" in template else None
