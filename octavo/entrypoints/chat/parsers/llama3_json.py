"""``{"name": ..., "parameters": {...}}`` as the whole message, or after ``<|python_tag|>``: Llama 3.1 to 3.3.

Calls may follow each other with ``;`` or ``,`` between. An object that names none of the request's functions is an
answer in JSON, not a call.
"""

from __future__ import annotations

from octavo.entrypoints.chat.parsers.calls import Calls, json_calls
from octavo.entrypoints.chat.parsers.cursor import Cursor, Step
from octavo.entrypoints.chat.parsers.formats import CallSyntax, ToolFormat, Tools

TAG = "<|python_tag|>"

SYNTAX = CallSyntax(
    trigger='{"name": "', before_name='{"name": "', after_name='", "parameters": ', end="}", between="; "
)


def _grammar(cursor: Cursor, tools: Tools) -> Step[None]:
    calls = Calls(cursor)
    cursor.hold()
    yield from cursor.space()
    called = yield from _calls_here(cursor, calls, tools)
    while (yield from cursor.until((TAG,), cursor.say, after_call=called)):
        called = yield from _calls_here(cursor, calls, tools)


def _calls_here(cursor: Cursor, calls: Calls, tools: Tools) -> Step[bool]:
    """Whether there was a call. What was read and is none has been said."""
    yield from cursor.accept(TAG)
    return (yield from json_calls(cursor, calls, known=tools, separators=(";", ",")))


FORMAT = ToolFormat(tags=(TAG,), grammar=_grammar, syntax=lambda template: SYNTAX)
