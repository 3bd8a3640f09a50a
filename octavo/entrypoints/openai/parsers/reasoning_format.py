"""What a format of reasoning is: its tags, and a grammar to tell thinking from answer. Knows no single format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.entrypoints.openai.parsers.base import Parser
from octavo.entrypoints.openai.parsers.cursor import Cursor, Incremental, Step


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
