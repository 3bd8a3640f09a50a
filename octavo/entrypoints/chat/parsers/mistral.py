"""``[TOOL_CALLS]``, in both of Mistral's forms: a JSON array of calls, or (since 2025) ``name[ARGS]{...}`` a tag.

Older vocabularies of the second form write the arguments right after the name, or an id between: ``[CALL_ID]``.
"""

from __future__ import annotations

from octavo.entrypoints.chat.parsers.calls import MAX_NAME, NAME, Calls, json_calls, short_id
from octavo.entrypoints.chat.parsers.cursor import Cursor, Step
from octavo.entrypoints.chat.parsers.formats import CallSyntax, ToolFormat, Tools

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

ARRAY = CallSyntax(
    trigger=TAG,
    opening=TAG + "[",
    before_name='{"name": "',
    after_name='", "arguments": ',
    end="}",
    between=", ",
    closing="]",
)
NAMED = CallSyntax(trigger=TAG, before_name=TAG, after_name=ARGS, end="", between="")
BARE = CallSyntax(trigger=TAG, before_name=TAG, after_name="", end="", between="")


def _syntax(template: str) -> CallSyntax:
    if ARGS in template:
        return NAMED
    return ARRAY if TAG + "[" in template or TAG + " [" in template else BARE


def _grammar(cursor: Cursor, tools: Tools) -> Step[None]:
    calls = Calls(cursor)
    called = False
    while (yield from cursor.until((TAG,), cursor.say, after_call=called)):
        called = True
        yield from cursor.space()
        if (yield from cursor.accept("[")):
            called = yield from json_calls(cursor, calls, separators=(",",), short=True)
            if called and not (yield from cursor.accept_spaced("]")):
                called = False
        elif (yield from cursor.peek()) == "{":
            called = yield from json_calls(cursor, calls, short=True)
        else:
            called = yield from _named_call(cursor, calls)


def _named_call(cursor: Cursor, calls: Calls) -> Step[bool]:
    """``name{...}``, with the tags that may be between."""
    name = yield from cursor.take(NAME)
    identity = short_id()
    if (yield from cursor.accept(CALL_ID)):
        identity = (yield from cursor.take(NAME)) or identity
    yield from cursor.accept(ARGS)
    yield from cursor.space()
    if not name or len(name) > MAX_NAME or (yield from cursor.peek()) != "{":
        cursor.say(cursor.since())
        cursor.hold()
        return False
    calls.begin(name, identity)
    yield from cursor.json_value(calls.piece)
    cursor.hold()
    return True


FORMAT = ToolFormat(tags=(TAG, CALL_ID, ARGS), grammar=_grammar, syntax=_syntax)
