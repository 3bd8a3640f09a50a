"""When a model must call tools, or must keep to a schema where it does: the constraint that makes it.

The calls are written as the model's own format has them, so one parser reads them, free or forced.
"""

from __future__ import annotations

from typing import Any

from octavo.entrypoints.openai.parsers.reasoning_format import ReasoningFormat
from octavo.entrypoints.openai.parsers.tool_format import CallSyntax
from octavo.entrypoints.openai.prompts import ChatSetup
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.structural_tag import Tag, tool_calls

ANY_OBJECT = {"type": "object"}
SPACE_AFTER_THINKING = r"\s{0,2}"


def call_constraint(setup: ChatSetup, *, parallel: bool, thinking: bool) -> StructuredOutputsParams | None:
    """The constraint of one answer; None where the model is free. ``thinking``: the prompt has opened the thinking.

    A demanded call (required, or named) follows its schema. Otherwise the text is free, and a call in it follows its
    schema if its function is strict.
    """
    use, chat = setup.use, setup.format
    if chat.tools is None or not use.schemas or not (use.demanded or use.strict & use.schemas.keys()):
        return None
    syntax = chat.tools.syntax(chat.text)
    if not use.demanded:
        tags = [_tag(syntax, n, s if n in use.strict else ANY_OBJECT, alone=True) for n, s in use.schemas.items()]
        return tool_calls(tags, required=False, parallel=parallel, triggers=[syntax.trigger])
    tags = [_tag(syntax, name, schema, alone=False) for name, schema in use.schemas.items()]
    several = parallel and use.named is None
    calls = tool_calls(
        tags,
        required=True,
        parallel=several,
        separator=syntax.between,
        prefix=syntax.opening,
        suffix=syntax.closing,
    )
    return calls if chat.reasoning is None else _after_thinking(calls, chat.reasoning, thinking)


def _tag(syntax: CallSyntax, name: str, schema: Any, *, alone: bool) -> Tag:
    """One function's call; ``alone``, with the marks that surround a list of calls."""
    opening, closing = (syntax.opening, syntax.closing) if alone else ("", "")
    return Tag(opening + syntax.before_name + name + syntax.after_name, schema, syntax.end + closing)


def _after_thinking(
    calls: StructuredOutputsParams, reasoning: ReasoningFormat, opened: bool
) -> StructuredOutputsParams:
    """``calls``, with free thinking before them: to be closed where the prompt opened it, possible where it did not."""
    assert isinstance(calls.structural_tag, dict)
    thoughts: list[Any] = [
        {"type": "any_text"},
        {"type": "const_string", "value": reasoning.close},
        {"type": "regex", "pattern": SPACE_AFTER_THINKING},
    ]
    forced = calls.structural_tag["format"]
    then: dict[str, Any] = {"type": "sequence", "elements": [*thoughts, forced]}
    if not opened:
        opening = {"type": "const_string", "value": reasoning.open}
        then = {"type": "or", "elements": [{"type": "sequence", "elements": [opening, *thoughts, forced]}, forced]}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": then})
