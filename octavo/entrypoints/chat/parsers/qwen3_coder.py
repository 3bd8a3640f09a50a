"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder's XML.

The values are bare text; the function's schema says which of them are strings. Calls as JSON within the same tags are
read too, for that is how a grammar makes such a model call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.entrypoints.chat.parsers.calls import MAX_NAME, Calls, json_calls
from octavo.entrypoints.chat.parsers.cursor import Cursor, Step
from octavo.entrypoints.chat.parsers.formats import TAGGED_JSON, ToolFormat, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
NAME_IN_TAG = re.compile(r"[^<>\n]*")


def _grammar(cursor: Cursor, tools: Tools) -> Step[None]:
    """Any number of calls, with text around them. The outer tags may be missing, as they sometimes are."""
    calls = Calls(cursor)
    tags: tuple[str, ...] = (OPEN, FUNCTION)
    called = False
    while tag := (yield from cursor.until(tags, cursor.say, after_call=called)):
        tags = (OPEN, FUNCTION)
        if tag == CLOSE:
            continue
        called = yield from _element(cursor, calls, tools, tag)
        if called and not (yield from cursor.accept_spaced(CLOSE, cut=True)):
            tags = (OPEN, FUNCTION, CLOSE)


def _element(cursor: Cursor, calls: Calls, tools: Tools, opening: str) -> Step[bool]:
    """What comes after ``opening``. False if it is no call; it has been said then."""
    if opening == OPEN:
        yield from cursor.space()
        if (yield from cursor.peek()) == "{":
            return (yield from json_calls(cursor, calls))
        if not (yield from cursor.accept(FUNCTION)):
            cursor.say(cursor.since())
            cursor.hold()
            return False
    name = yield from cursor.take(NAME_IN_TAG)
    if not name.strip() or len(name) > MAX_NAME or not (yield from cursor.accept(">")):
        cursor.say(cursor.since())
        cursor.hold()
        return False
    calls.begin(name.strip())
    cursor.hold()
    properties = tools.get(name.strip(), {}).get("properties")
    yield from _parameters(cursor, calls, properties if isinstance(properties, Mapping) else {})
    cursor.hold()
    return True


def _parameters(cursor: Cursor, calls: Calls, properties: Mapping[str, Any]) -> Step[None]:
    """The rest of a call, as one JSON object. It stays open if the text ends within."""
    before = "{"
    while (yield from cursor.accept_spaced(PARAMETER, cut=True)):
        key = (yield from cursor.take(NAME_IN_TAG)).strip()
        if not (yield from cursor.accept(">")):
            break
        calls.piece(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _value(cursor, calls, properties.get(key))
        cursor.hold()
    if cursor.at_end:
        return
    if before != "{":
        calls.piece("}")
    calls.end()
    if not (yield from cursor.accept_spaced(END_FUNCTION, cut=True)) and cursor.since().strip():
        cursor.say(cursor.since())


def _value(cursor: Cursor, calls: Calls, schema: Any) -> Step[None]:
    """One bare value. A string is passed on as it comes; another kind is known once all of it is there."""
    yield from cursor.accept("\n")
    ends = ("\n" + END_PARAMETER, END_PARAMETER)
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        calls.piece('"')
        if (yield from cursor.until(ends, lambda text: calls.piece(_escaped(text)), trim=False)):
            calls.piece('"')
        return
    held: list[str] = []
    whole = yield from cursor.until(ends, held.append, trim=False)
    text = "".join(held)
    calls.piece(_as_json(text) if whole else text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """A value that may be other than a string: JSON if it is any, Python's three words, else a string after all."""
    word = text.strip()
    if word in PYTHON_WORDS:
        return PYTHON_WORDS[word]
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


FORMAT = ToolFormat(tags=(OPEN, CLOSE), grammar=_grammar, syntax=lambda template: TAGGED_JSON)
