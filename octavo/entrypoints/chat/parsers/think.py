"""Thinking in tags before the answer: ``<think>`` of DeepSeek-R1, Qwen 3 and many others, ``[THINK]`` of Mistral's.

The opening tag may be the prompt's last word, as some chat templates have it; the text then begins within the thinking.
"""

from __future__ import annotations

from octavo.entrypoints.chat.parsers.base import Reasoning
from octavo.entrypoints.chat.parsers.cursor import Cursor, Step
from octavo.entrypoints.chat.parsers.formats import ReasoningFormat


def _between(opening: str, closing: str) -> ReasoningFormat:
    """The format with these tags. White space at their inner and outer edges belongs to them."""

    def grammar(cursor: Cursor, opened: bool) -> Step[None]:
        if not opened:
            cursor.hold()
            opened = yield from cursor.accept_spaced(opening)
            if not opened:
                cursor.say(cursor.since())
        if opened:
            yield from cursor.space()
            if (yield from cursor.until((closing,), lambda text: cursor.say(text, Reasoning))):
                yield from cursor.space()
        yield from cursor.rest()

    return ReasoningFormat(open=opening, close=closing, grammar=grammar)


FORMAT = _between("<think>", "</think>")
MISTRAL = _between("[THINK]", "[/THINK]")
