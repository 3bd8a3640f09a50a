"""``<think>...</think>`` before the answer: DeepSeek-R1, Qwen 3 and many others.

The opening tag may be the prompt's last word, as some chat templates have it; the text then begins within the thinking.
"""

from __future__ import annotations

from octavo.entrypoints.openai.parsers.base import Reasoning
from octavo.entrypoints.openai.parsers.cursor import Cursor, Step
from octavo.entrypoints.openai.parsers.reasoning_format import ReasoningFormat

OPEN, CLOSE = "<think>", "</think>"


def _grammar(cursor: Cursor, opened: bool) -> Step[None]:
    """White space at the inner and outer edges of the tags belongs to them."""
    if not opened:
        cursor.hold()
        opened = yield from cursor.accept_spaced(OPEN)
        if not opened:
            cursor.say(cursor.since())
    if opened:
        yield from cursor.space()
        if (yield from cursor.until((CLOSE,), lambda text: cursor.say(text, Reasoning))):
            yield from cursor.space()
    yield from cursor.rest()


FORMAT = ReasoningFormat(open=OPEN, close=CLOSE, grammar=_grammar)
