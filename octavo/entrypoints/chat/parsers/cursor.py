"""Parsers as coroutines over text that is still arriving: the grammar reads as if all of it were there.

A parser is a generator that takes a :class:`Cursor` and asks it for what comes next with ``yield from``; the cursor
yields whenever the answer depends on text that has not come. So where the text is cut cannot matter. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from octavo.entrypoints.chat.parsers.base import Content, Delta, Reasoning

T = TypeVar("T")
Step = Generator[None, None, T]  # waits for text now and then, and returns a T

SPACE = re.compile(r"\s*")
JSON_PLAIN = re.compile(r'[^"{}\[\]]*')  # within a JSON container, outside of strings
JSON_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
JSON_SCALAR = re.compile(r"[-+.\w]*")
MAX_TRIMMED = 1024  # what is held back is looked at again with every piece that comes
BRACKETS = {"{": "}", "[": "]"}


class Cursor:
    """The text that is not consumed yet, and the deltas that the parser has found (``deltas``).

    Methods that return a Step wait for text. At the end of the text they answer with what there is.
    """

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._text = ""
        self._at = 0  # the next character
        self._held = 0  # since() begins here
        self._ended = False

    def give(self, text: str) -> None:
        """More text has come."""
        start = min(self._held, self._at)
        self._text = self._text[start:] + text
        self._at -= start
        self._held -= start

    def end(self) -> None:
        """No more will come."""
        self._ended = True

    @property
    def at_end(self) -> bool:
        """All text has come and is consumed."""
        return self._ended and self._at == len(self._text)

    # ---- what the parser says

    def say(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        if text:
            self.deltas.append(kind(text))

    def hold(self) -> None:
        """Remember the text from here on."""
        self._held = self._at

    def since(self) -> str:
        """What was consumed since :meth:`hold`."""
        return self._text[self._held : self._at]

    def back(self) -> None:
        """Give back what was consumed since :meth:`hold`."""
        self._at = self._held

    # ---- reading

    def _more(self) -> Step[bool]:
        """Wait for text; False at the end."""
        if self._ended:
            return False
        yield
        return True

    def peek(self) -> Step[str]:
        """The next character, which stays; empty at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def take(self, pattern: re.Pattern[str]) -> Step[str]:
        """Consume all characters of a set; ``pattern`` is the set with a star (``[a-z]*``)."""
        pieces = []
        while True:
            end = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]
            pieces.append(self._text[self._at : end])
            self._at = end
            if end < len(self._text) or not (yield from self._more()):
                return "".join(pieces)

    def space(self) -> Step[str]:
        """Consume white space."""
        return (yield from self.take(SPACE))

    def accept(self, literal: str, *, cut: bool = False) -> Step[bool]:
        """Consume ``literal`` if it is what comes next; with ``cut``, also a beginning of it where the text ends."""
        while len(self._text) - self._at < len(literal) and literal.startswith(self._text[self._at :]):
            if not (yield from self._more()):
                here = cut and self._at < len(self._text)
                self._at = len(self._text) if cut else self._at
                return here
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def accept_spaced(self, literal: str, *, cut: bool = False) -> Step[bool]:
        """:meth:`accept` after white space, which is consumed in any case."""
        yield from self.space()
        return (yield from self.accept(literal, cut=cut))

    def rest(self) -> Step[None]:
        """All that comes is content."""
        while True:
            self.say(self._text[self._at :])
            self._at = self._held = len(self._text)
            if not (yield from self._more()):
                return

    def until(
        self, tags: Sequence[str], sink: Callable[[str], None], *, trim: bool = True, after_call: bool = False
    ) -> Step[str]:
        """Pass text to ``sink`` up to the first of ``tags``, which is consumed and returned; empty at the end.

        What :meth:`since` tells begins with the tag, and with the white space that was trimmed.
        ``trim`` drops white space right before the tag (MAX_TRIMMED characters of it), ``after_call`` a rest of nothing
        else at the end.
        """
        passed = False
        scan = _scan(tuple(tags))
        while True:
            if found := scan.pattern.search(self._text, self._at):
                text = self._text[self._at : found.start()]
                text = _trimmed(text) if trim else text
                self._held = self._at + len(text)
                self._at = found.end()
                if text:
                    sink(text)
                return found[0]
            text = self._text[self._at :]
            if held := scan.may_begin(text):
                text = text[:-held]
            text = _trimmed(text) if trim else text
            self._at += len(text)
            self.hold()
            if text:
                sink(text)
                passed = True
            if not (yield from self._more()):
                text = self._text[self._at :]
                self._at = self._held = len(self._text)
                if text and (passed or not after_call or not text.isspace()):
                    sink(text)
                return ""

    # ---- JSON

    def json_string(self) -> Step[str | None]:
        """Consume a JSON string; None if what comes is none."""
        yield from self.space()
        if (yield from self.peek()) != '"':
            return None
        pieces: list[str] = []
        if not (yield from self.json_value(pieces.append)):
            return None
        try:
            return str(json.loads("".join(pieces), strict=False))
        except ValueError:
            return None

    def json_value(self, sink: Callable[[str], None]) -> Step[bool]:
        """Pass the text of one JSON value to ``sink`` as it comes; True once it is whole.

        Brackets must match and strings must end; what else is wrong inside is not this side's to judge.
        """
        yield from self.space()
        first = yield from self.peek()
        if first not in ('"', *BRACKETS):
            scalar = yield from self.take(JSON_SCALAR)
            sink(scalar)
            return bool(scalar)
        closers: list[str] = []
        while True:
            start = self._at
            whole = self._scan_json(closers)
            if self._at > start:
                sink(self._text[start : self._at])
            if whole is not None:
                return whole
            if not (yield from self._more()):
                if rest := self._text[self._at :]:
                    sink(rest)
                self._at = len(self._text)
                return False

    def _scan_json(self, closers: list[str]) -> bool | None:
        """Consume what there is of a value whose open brackets (and quote) are ``closers``: True at its end, False at
        a bracket that does not match, None where the text ends first."""
        text, at = self._text, self._at
        while at < len(text):
            if closers and closers[-1] == '"':
                at = JSON_STRING.match(text, at).end()  # type: ignore[union-attr]
                if at == len(text) or text[at] == "\\":  # an escape whose second half is still to come
                    break
                closers.pop()
                at += 1
            else:
                at = JSON_PLAIN.match(text, at).end() if closers else at  # type: ignore[union-attr]
                if at == len(text):
                    break
                char = text[at]
                if char == '"' or char in BRACKETS:
                    closers.append(BRACKETS.get(char, char))
                elif closers.pop() != char:
                    self._at = at
                    return False
                at += 1
            if not closers:
                self._at = at
                return True
        self._at = at
        return None


def _trimmed(text: str) -> str:
    return text[: max(len(text.rstrip()), len(text) - MAX_TRIMMED)]


class _Scan:
    """Looks for tags, none of which begins with another."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, tags)))
        self._tags = tags
        self._longest = max(map(len, tags)) - 1
        self._first = re.compile("|".join(sorted({re.escape(tag[0]) for tag in tags})))

    def may_begin(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a tag."""
        if self._longest == 0:
            return 0
        tail = text[-self._longest :]
        for found in self._first.finditer(tail):
            end = tail[found.start() :]
            if any(tag.startswith(end) for tag in self._tags):
                return len(end)
        return 0


_scan = lru_cache(maxsize=64)(_Scan)


class Incremental:
    """A :class:`Parser` whose grammar is a generator over a cursor."""

    def __init__(self, grammar: Callable[[Cursor], Step[None]]) -> None:
        self._cursor = Cursor()
        self._grammar = grammar(self._cursor)

    def feed(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        self._cursor.give(text)
        return self._advance()

    def finish(self) -> Sequence[Delta]:
        self._cursor.end()
        return self._advance()

    def _advance(self) -> Sequence[Delta]:
        next(self._grammar, None)
        deltas, self._cursor.deltas = self._cursor.deltas, []
        return deltas
