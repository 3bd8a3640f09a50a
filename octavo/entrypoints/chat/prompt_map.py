"""Which part of a rendered prompt came of which message: for ``cache_control``, and to say where a prompt missed.

A template writes the whole prompt at once, so parts are found by rendering beginnings of the conversation and comparing
texts. That is done only for requests that ask for it. Knows nothing of KV blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo.entrypoints.chat.prompts import ChatInput, ChatMessage, ChatPrompt, ChatSetup, render_chat
from octavo.exceptions import ValidationError
from octavo.messages import CacheMiss, CachePin
from octavo.tokenizer.base import Tokenizer

TTLS = {"5m": 300.0, "1h": 3600.0}
MAX_BREAKPOINTS = 4  # Anthropic's


class Breakpoint(NamedTuple):
    """Keep the prompt for ``ttl`` seconds up to a message: its first ``end`` characters or parts, or all."""

    message: int
    end: int | None
    ttl: float


class Marks(NamedTuple):
    """Breakpoints, and what the client calls each message."""

    breakpoints: Sequence[Breakpoint]
    names: Sequence[str]


def read_ttl(value: Any, where: str) -> float | None:
    """The seconds that the ``cache_control`` at ``where`` asks for; None if it asks for nothing."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    ttl = value.get("ttl") if isinstance(value, dict) else None
    if kind != "ephemeral" or not (ttl is None or (isinstance(ttl, str) and ttl in TTLS)):
        field = where.partition("[")[0].partition(".")[0]
        rule = '{"type": "ephemeral"}, with an optional "ttl" of "5m" or "1h"'
        raise ValidationError(f"{where}: must be {rule}", parameter=field)
    return TTLS[ttl or "5m"]


def check_number(breakpoints: Sequence[Breakpoint]) -> None:
    """Raises ValidationError for more than MAX_BREAKPOINTS."""
    if len(breakpoints) > MAX_BREAKPOINTS:
        count = len(breakpoints)
        raise ValidationError(
            f"cache_control: at most {MAX_BREAKPOINTS} may be given, got {count}", parameter="cache_control"
        )


def chat_marks(messages: Sequence[ChatMessage]) -> Marks:
    """What the content parts of chat messages ask for. Raises ValidationError."""
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            where = f"messages[{index}].content[{number}].cache_control"
            ttl = read_ttl(part.get("cache_control"), where)
            if ttl is not None:
                found.append(Breakpoint(index, number + 1, ttl))
    check_number(found)
    return Marks(found, [f"messages[{index}]" for index in range(len(messages))])


class PromptMap:
    """The ``prompt`` that came of ``chat``, whose messages are called ``marks.names``.

    ``num_cut``: how many tokens at its beginning were cut off before it is run.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatInput, setup: ChatSetup, prompt: ChatPrompt, marks: Marks, num_cut: int
    ) -> None:
        self._tokenizer, self._setup, self._prompt = tokenizer, setup, prompt
        self._marks, self._num_cut = marks, num_cut
        self._chat = dataclasses.replace(chat, add_generation_prompt=False, continue_final_message=False)

    async def pins(self) -> list[CachePin]:
        """The breakpoints as numbers of tokens, shortest first.

        None of a prompt that lacks its beginning, which nothing else will begin like.
        """
        return await asyncio.to_thread(self._pins) if self._marks.breakpoints and not self._num_cut else []

    def _pins(self) -> list[CachePin]:
        ttls: dict[int, float] = {}
        for message, end, ttl in self._marks.breakpoints:
            num_tokens = self._num_tokens(self._num_chars(message, end))
            ttls[num_tokens] = max(ttl, ttls.get(num_tokens, 0.0))
        return [CachePin(num_tokens, ttl) for num_tokens, ttl in sorted(ttls.items()) if num_tokens > 0]

    def message_of(self, miss: CacheMiss) -> str | None:
        """The name of the message that ``miss`` is in, if it is in one; takes a few renderings."""
        if miss.kind not in ("differs", "ends"):
            return None
        index = self._message_at(miss.position + self._num_cut)
        return None if index is None else self._marks.names[index]

    def _message_at(self, position: int) -> int | None:
        """The message that token ``position`` is in; None behind the last one, and where the template does not tell."""
        ids = self._prompt.token_ids
        rest = len(self._tokenizer.decode(ids[position:], skip_special_tokens=False))
        place = len(self._prompt.text) - rest
        low, high = 0, len(self._chat.messages) - 1
        if place >= self._num_chars(high, None):
            return None
        while low < high:
            middle = (low + high) // 2
            if place < self._num_chars(middle, None):
                high = middle
            else:
                low = middle + 1
        return low

    def _num_chars(self, index: int, end: int | None) -> int:
        """How much of the text comes of the messages up to a place within message ``index``."""
        last = self._chat.messages[index]
        if end is not None:
            content = last.get("content")
            last = {**last, "content": None if content is None else content[:end], "tool_calls": None}
        part = dataclasses.replace(self._chat, messages=[*self._chat.messages[:index], last])
        try:
            text = render_chat(self._tokenizer, part, self._setup)
        except ValidationError:  # a template that wants whole conversations
            return 0
        return _common(text, self._prompt.text)

    def _num_tokens(self, num_chars: int) -> int:
        """Leading tokens that the first ``num_chars`` characters come to."""
        special = self._chat.add_special_tokens
        ids = self._tokenizer.encode(self._prompt.text[:num_chars], add_special_tokens=special) if num_chars else []
        return _common(ids, self._prompt.token_ids)  # the last ones may differ, where a token goes on


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
