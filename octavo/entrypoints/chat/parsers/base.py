"""What a parser is, what it yields, and the two that need no format: nothing to parse, and one parser after another.

A parser sees text only, never tokens, and its deltas joined do not depend on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thinking."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of call ``index`` (0, 1, ... within the message). ``id`` and ``name`` come once, in its first piece."""

    index: int
    arguments: str = ""  # a piece of JSON text; the pieces of one call joined are one JSON object
    id: str | None = None
    name: str | None = None


Delta = Content | Reasoning | ToolCallDelta


class Parser(Protocol):
    """One message on its way, of one choice. It never raises for what a model wrote and never drops text silently."""

    def feed(self, text: str) -> Sequence[Delta]:
        """What is certain after ``text`` arrived; what may yet become a tag is held back."""
        ...

    def finish(self) -> Sequence[Delta]:
        """The message has ended: what was held back, as what it turned out to be."""
        ...


class NullParser:
    """All is content."""

    def feed(self, text: str) -> Sequence[Delta]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        return ()


class Chain:
    """``first`` over the text, ``second`` over what ``first`` calls content."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> Sequence[Delta]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> Sequence[Delta]:
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, deltas: Sequence[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                out += self._second.feed(delta.text)
            else:
                out.append(delta)
        return out
