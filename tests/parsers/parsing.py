"""Running a parser over pieces of text, and joining what it found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from octavo.entrypoints.chat.parsers.base import Content, Delta, Parser, Reasoning, ToolCallDelta
from octavo.entrypoints.chat.parsers.formats import reasoning_format, tool_format

TOOLS: dict[str, dict[str, Any]] = {
    "now": {"type": "object", "properties": {}},
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
}


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """``text`` cut at ``cuts``."""
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def joined(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that ``deltas`` make up; also checks that each call begins with its id and name, once."""
    content, reasoning, calls = "", "", []
    for delta in deltas:
        if isinstance(delta, Content):
            assert delta.text
            content += delta.text
        elif isinstance(delta, Reasoning):
            assert delta.text
            reasoning += delta.text
        else:
            assert isinstance(delta, ToolCallDelta)
            if delta.id is not None:
                assert delta.index == len(calls)
                assert delta.name
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            assert delta.name is None or delta.id is not None
            calls[-1][1] += delta.arguments
    return {"content": content, "reasoning": reasoning, "calls": [tuple(call) for call in calls]}


def run(parser: Parser, chunks: Sequence[str]) -> dict[str, Any]:
    """The message that ``parser`` makes of ``chunks``."""
    deltas: list[Delta] = []
    for chunk in chunks:
        deltas += parser.feed(chunk)
    return joined([*deltas, *parser.finish()])


PARSERS: dict[str, Callable[[], Parser]] = {
    **{n: (lambda n=n: tool_format(n).parser(TOOLS)) for n in ("hermes", "llama3_json", "mistral", "qwen3_coder")},
    "qwen3": lambda: reasoning_format("qwen3").parser(False),
    "mistral thinking": lambda: reasoning_format("mistral").parser(False),
    "qwen3, opened": lambda: reasoning_format("qwen3").parser(True),
}
