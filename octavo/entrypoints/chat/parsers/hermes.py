"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many who copied them.

Small models (Qwen2.5-Coder above all) often forget the tags, or put others. So an object that names one of the
request's functions is a call too where it is the whole message or stands in a code block or in a similar tag.
"""

from __future__ import annotations

from octavo.entrypoints.chat.parsers.calls import Calls, json_calls
from octavo.entrypoints.chat.parsers.cursor import Cursor, Step
from octavo.entrypoints.chat.parsers.formats import TAGGED_JSON, ToolFormat, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE = "```"
CLOSINGS = {OPEN: CLOSE, FENCE: FENCE, "<tools>": "</tools>", "<function_call>": "</function_call>"}
TAGS = tuple(CLOSINGS)


def _grammar(cursor: Cursor, tools: Tools) -> Step[None]:
    """Any number of calls, with text around them. What is no call stays content."""
    calls = Calls(cursor)
    cursor.hold()
    yield from cursor.space()
    if (yield from cursor.peek()) == "{":
        called = yield from json_calls(cursor, calls, known=tools)
    else:
        called = False
        cursor.back()
    closing = ""  # the one that is still to come
    while tag := (yield from cursor.until((*TAGS, closing) if closing else TAGS, cursor.say, after_call=called)):
        if tag == closing:
            closing = ""
            continue
        if tag == FENCE:
            yield from cursor.accept("json")
        called = yield from json_calls(cursor, calls, known=None if tag == OPEN else tools)
        closing = CLOSINGS[tag] if called else ""
        if closing and (yield from cursor.accept_spaced(closing, cut=True)):
            closing = ""


FORMAT = ToolFormat(tags=(OPEN, CLOSE), grammar=_grammar, syntax=lambda template: TAGGED_JSON)
