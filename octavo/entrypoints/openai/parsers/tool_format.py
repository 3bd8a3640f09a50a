"""What a format of tool calls is: a grammar to read it with, and the texts to demand it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.entrypoints.openai.parsers.base import Parser
from octavo.entrypoints.openai.parsers.cursor import Cursor, Incremental, Step

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
