"""How the text of one choice is read while it comes: its parser, and what must be counted on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.entrypoints.chat.parsers.base import Chain, Delta, NullParser, Parser, Reasoning, ToolCallDelta
from octavo.entrypoints.chat.prompts import ChatInput, ChatPrompt, ChatSetup

if TYPE_CHECKING:
    from octavo.tokenizer.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """What a client wants of the messages that answer. ``top_logprobs`` alternatives a token need ``logprobs``."""

    logprobs: bool = False
    top_logprobs: int | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    echo: bool = False  # put the last message before every answer, where it is of the same role


@dataclass(frozen=True)
class Reader:
    """What the choices of one request have in common.

    ``think_end`` is the id of the token that closes the thinking; with None the thinking is tokenised to be counted.
    """

    make_parser: Callable[[], Parser]
    named: bool = False  # tool_choice named a function: OpenAI ends such an answer with stop
    first_call_only: bool = False
    show_reasoning: bool = True
    reasons: bool = False
    think_end: int | None = None


PLAIN = Reader(NullParser)


def reader_for(reply: ReplyOptions, setup: ChatSetup, *, thinking: bool) -> Reader:
    """The reader of a request; ``thinking``: the model begins within its thinking."""
    tools = setup.format.tools if setup.use.schemas else None
    reasoning = setup.format.reasoning
    if tools is None and reasoning is None:
        return PLAIN
    schemas = setup.use.schemas

    def make_parser() -> Parser:
        inner = NullParser() if tools is None else tools.parser(schemas)
        return inner if reasoning is None else Chain(reasoning.parser(thinking), inner)

    return Reader(
        make_parser,
        named=setup.use.named is not None,
        first_call_only=not reply.parallel_tool_calls,
        show_reasoning=reply.include_reasoning,
        reasons=reasoning is not None,
        think_end=setup.format.think_end,
    )


def thinking_is_open(chat: ChatInput, setup: ChatSetup, prompt: ChatPrompt) -> bool:
    """Whether the model begins within its thinking."""
    reasoning = setup.format.reasoning
    if reasoning is None:
        return False
    last = chat.messages[-1].get("content")
    continued = last if chat.continue_final_message and isinstance(last, str) else None
    return reasoning.opened_by(prompt.text, continued)


class Reading:
    """One choice. ``reasoning_tokens`` is right once the thinking has been closed, or the choice has ended."""

    def __init__(self, reader: Reader, tokenizer: Tokenizer) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        self._parser = reader.make_parser()
        self._called = False
        self._thoughts: list[str] = []
        self._num_tokens = 0
        self._closed_at: int | None = None  # tokens up to the end of the thinking

    def feed(self, text: str, token_ids: list[int], finish_reason: str | None) -> tuple[Sequence[Delta], str | None]:
        """(deltas, finish reason) of the next piece of text."""
        deltas = self._parser.feed(text)
        if finish_reason is not None and (rest := self._parser.finish()):
            deltas = [*deltas, *rest]
        if self._reader is PLAIN:
            return deltas, finish_reason
        self._count(token_ids)
        kept = [delta for delta in deltas if self._keep(delta)]
        if finish_reason == "stop" and self._called and not self._reader.named:
            finish_reason = "tool_calls"
        return kept, finish_reason

    def _keep(self, delta: Delta) -> bool:
        if isinstance(delta, ToolCallDelta):
            self._called = True
            return delta.index == 0 or not self._reader.first_call_only
        if isinstance(delta, Reasoning):
            self._thoughts.append(delta.text)
            return self._reader.show_reasoning
        return True

    def _count(self, token_ids: list[int]) -> None:
        if self._closed_at is None and self._reader.think_end in token_ids:
            self._closed_at = self._num_tokens + token_ids.index(self._reader.think_end) + 1
        self._num_tokens += len(token_ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the thinking, its closing tag with them; None where the model cannot think."""
        if not self._reader.reasons:
            return None
        if not self._thoughts:
            return 0
        if self._reader.think_end is None:
            return len(self._tokenizer.encode("".join(self._thoughts), add_special_tokens=False))
        return self._num_tokens if self._closed_at is None else self._closed_at
