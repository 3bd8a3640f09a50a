"""What parsers of tool calls share: numbering calls, and reading a call that is one JSON object. Knows no tags."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Container

from octavo.entrypoints.chat.parsers.base import ToolCallDelta
from octavo.entrypoints.chat.parsers.cursor import Cursor, Step

ALPHANUMERIC = string.ascii_letters + string.digits
NAME = re.compile(r"[-.\w]*")
MAX_NAME = 256
KEYS = ("name", "arguments", "parameters", "id", "type")


def call_id() -> str:
    """``call_`` and 24 random characters, as OpenAI's."""
    return "call_" + short_id(24)


def short_id(length: int = 9) -> str:
    """Random letters and digits; Mistral's templates insist on nine."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(length))


class Calls:
    """Numbers the calls of one message and writes their deltas into ``cursor``."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._index = -1
        self._empty = False  # the open call has no arguments yet

    def begin(self, name: str, identity: str | None = None) -> None:
        self._index += 1
        self._empty = True
        self._cursor.deltas.append(ToolCallDelta(self._index, "", identity or call_id(), name))

    def piece(self, arguments: str) -> None:
        """More of the open call's arguments."""
        if not arguments:
            return
        self._empty = False
        deltas = self._cursor.deltas
        last = deltas[-1] if deltas else None
        if isinstance(last, ToolCallDelta) and last.id is None and last.index == self._index:
            deltas[-1] = ToolCallDelta(self._index, last.arguments + arguments)
        else:
            deltas.append(ToolCallDelta(self._index, arguments))

    def end(self) -> None:
        """A call without arguments has ``{}``."""
        if self._empty:
            self.piece("{}")
        self._empty = False


def json_calls(
    cursor: Cursor,
    calls: Calls,
    *,
    separators: tuple[str, ...] = ("",),
    known: Container[str] | None = None,
    short: bool = False,
) -> Step[bool]:
    """Read calls as objects, with at most one of ``separators`` between them. Whether there was any.

    What was read since ``cursor.hold()`` and is no call is said as content.
    """
    called = False
    while (yield from _json_call(cursor, calls, known, short)):
        called = True
        yield from cursor.space()
        for separator in separators:
            if (yield from cursor.accept(separator)):
                break
        yield from cursor.space()
        if (yield from cursor.peek()) != "{":
            if cursor.since().strip() and not cursor.at_end:
                cursor.say(cursor.since())  # it did not separate calls
            cursor.hold()
            return True
        cursor.hold()
    cursor.say(cursor.since())
    cursor.hold()
    return called


def _json_call(cursor: Cursor, calls: Calls, known: Container[str] | None, short: bool) -> Step[bool]:
    """Read ``{"name": ..., "arguments": {...}}`` (or ``parameters``), streaming the arguments.

    False if it was no call (of a ``known`` name, where given): ``cursor.since()`` then has the text that was read. Once
    the name is out it is a call whatever follows; text that does not belong to it is said as content.
    """
    reading = _JsonCall(cursor, calls, known, short)
    if not (yield from cursor.accept_spaced("{")):
        return False
    doubled = yield from cursor.accept("{")  # as a template shows it whose author escaped what needed none
    whole = False
    while not whole and (yield from reading.member()):
        whole = yield from cursor.accept_spaced("}")
        if not whole and not (yield from cursor.accept_spaced(",")):
            break
    if not reading.begun:
        return False
    if whole and doubled:
        yield from cursor.accept("}")
    if whole or not cursor.at_end:
        calls.end()
    if not whole and not cursor.at_end:
        cursor.say(cursor.since())
    cursor.hold()
    return True


class _JsonCall:
    """Where the reading of one object stands."""

    def __init__(self, cursor: Cursor, calls: Calls, known: Container[str] | None, short: bool) -> None:
        self._cursor, self._calls, self._known, self._short = cursor, calls, known, short
        self._early: list[str] | None = None  # arguments that came before the name
        self.begun = False

    def member(self) -> Step[bool]:
        """One key and its value; False if it is malformed, or says that this is no call."""
        cursor = self._cursor
        if self.begun:
            cursor.hold()
        key = yield from cursor.json_string()
        if key is None or not (yield from cursor.accept_spaced(":")):
            return False
        if key == "name" and not self.begun:
            return (yield from self._name())
        if self._known is not None and not self.begun and key not in KEYS:
            return False  # some other object: do not hold it back
        if key in ("arguments", "parameters") and self._early is None:
            return (yield from self._arguments())
        return (yield from cursor.json_value(_ignore))

    def _name(self) -> Step[bool]:
        name = yield from self._cursor.json_string()
        if not name or len(name) > MAX_NAME or (self._known is not None and name not in self._known):
            return False
        self._calls.begin(name, short_id() if self._short else None)
        self.begun = True
        self._calls.piece("".join(self._early or ()))
        return True

    def _arguments(self) -> Step[bool]:
        """An object, passed on as it comes; or a string that holds one; or null for none."""
        cursor = self._cursor
        self._early = []
        yield from cursor.space()
        first = yield from cursor.peek()
        if first == '"':
            decoded = yield from cursor.json_string()
            if decoded is None:
                return False
            self._sink(decoded.strip())
            return True
        if first in ("{", "["):
            return (yield from cursor.json_value(self._sink))
        held: list[str] = []
        whole = yield from cursor.json_value(held.append)
        text = "".join(held)
        self._sink("" if text == "null" else text)
        return whole

    def _sink(self, text: str) -> None:
        if self.begun:
            self._calls.piece(text)
            self._cursor.hold()
        elif self._early is not None:
            self._early.append(text)


def _ignore(text: str) -> None:
    """A member that says nothing of the call, such as an id or a type."""
