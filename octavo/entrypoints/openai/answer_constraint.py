"""What the text of a chat answer is held to: demanded and strict calls, a format for the content, thinking before both.

The calls are written as the model's own format has them, so one parser reads them, free or forced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.entrypoints.chat.parsers.formats import CallSyntax, ReasoningFormat
from octavo.entrypoints.openai.prompts import ChatSetup
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.structural_tag import Tag, tool_calls

ANY_OBJECT = {"type": "object"}
SPACE_AFTER_THINKING = r"\s{0,2}"
SPACE_IN_ARGUMENTS = r" ?"  # small models would else go on with white space for ever

Format = dict[str, Any]  # of a structural tag


def answer_constraint(
    setup: ChatSetup, content: StructuredOutputsParams | None, *, parallel: bool, thinking: bool, raw: bool
) -> StructuredOutputsParams | None:
    """The constraint of one answer; None where the model is free. ``thinking``: the prompt has opened the thinking.

    A demanded call (required, or named) follows its schema. Otherwise a call is free unless its function is strict.
    ``content`` is for answers that are no calls, or with ``raw`` for the text whatever it says. Thinking stays free.
    """
    use, chat = setup.use, setup.format
    callable_ = chat.tools is not None and bool(use.schemas)
    if content is not None and (raw or not callable_):
        forced = content
    elif callable_ and use.demanded:
        forced = _demanded(setup, parallel and use.named is None)
    elif callable_ and content is not None:
        forms = [_format(_demanded(setup, parallel, strict_only=True)), _format(content)]
        if None in forms:
            return content
        forced = _tagged({"type": "or", "elements": forms}, content)
    elif callable_ and use.strict & use.schemas.keys():
        return _where_called(setup, parallel)  # free text besides, and thinking is that
    else:
        return None
    form = None if chat.reasoning is None else _format(forced)
    if chat.reasoning is None or form is None:
        return forced
    return _tagged(_after_thinking(form, chat.reasoning, thinking), forced)


def _syntax(setup: ChatSetup) -> CallSyntax:
    assert setup.format.tools is not None
    return setup.format.tools.syntax(setup.format.text)


def _demanded(setup: ChatSetup, parallel: bool, *, strict_only: bool = False) -> StructuredOutputsParams:
    """Nothing but calls, at least one; with ``strict_only``, schemas hold for strict functions alone."""
    use, syntax = setup.use, _syntax(setup)
    tags = [_tag(syntax, n, s if not strict_only or n in use.strict else ANY_OBJECT) for n, s in use.schemas.items()]
    calls = tool_calls(
        tags,
        required=True,
        parallel=parallel,
        separator=syntax.between,
        prefix=syntax.opening,
        suffix=syntax.closing,
    )
    return msgspec.structs.replace(calls, whitespace_pattern=SPACE_IN_ARGUMENTS)


def _where_called(setup: ChatSetup, parallel: bool) -> StructuredOutputsParams:
    """Free text, and calls in it, whose strict functions keep to their schemas."""
    use, syntax = setup.use, _syntax(setup)
    tags = [
        _tag(syntax, name, schema if name in use.strict else ANY_OBJECT, alone=True)
        for name, schema in use.schemas.items()
    ]
    calls = tool_calls(tags, required=False, parallel=parallel, triggers=[syntax.trigger])
    return msgspec.structs.replace(calls, whitespace_pattern=SPACE_IN_ARGUMENTS)


def _tag(syntax: CallSyntax, name: str, schema: Mapping[str, Any], *, alone: bool = False) -> Tag:
    """One function's call; ``alone``, with the marks that surround a list of calls.

    A function that lists its parameters takes no others, unless its schema says so.
    """
    if "properties" in schema:
        schema = {"additionalProperties": False, **schema}
    opening, closing = (syntax.opening, syntax.closing) if alone else ("", "")
    return Tag(opening + syntax.before_name + name + syntax.after_name, schema, syntax.end + closing)


def _format(params: StructuredOutputsParams) -> Format | None:
    """The constraint as a part of a structural tag. None if it cannot be one: then the check will say what is wrong,
    or it is an older tag, whose text is free."""
    kind, value = params.kind, getattr(params, params.kind)
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": ANY_OBJECT}
    if kind == "choice":
        return {"type": "regex", "pattern": "|".join(map(_literally, value))}
    if kind in ("regex", "grammar"):
        return {"type": kind, "pattern" if kind == "regex" else "grammar": value}
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    if kind == "json":
        return {"type": "json_schema", "json_schema": parsed}
    form = parsed.get("format") if isinstance(parsed, Mapping) else None
    return dict(form) if isinstance(form, Mapping) else None


def _literally(text: str) -> str:
    """``text`` as a regular expression."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _tagged(form: Format, like: StructuredOutputsParams) -> StructuredOutputsParams:
    """``form`` as a constraint, with the settings of ``like``."""
    return StructuredOutputsParams(
        structural_tag={"type": "structural_tag", "format": form},
        disable_any_whitespace=like.disable_any_whitespace,
        disable_additional_properties=like.disable_additional_properties,
        whitespace_pattern=like.whitespace_pattern,
    )


def _after_thinking(then: Format, reasoning: ReasoningFormat, opened: bool) -> Format:
    """Free thinking before ``then``: to be closed where the prompt opened it, possible where it did not."""
    thoughts: list[Format] = [
        {"type": "any_text"},
        {"type": "const_string", "value": reasoning.close},
        {"type": "regex", "pattern": SPACE_AFTER_THINKING},
    ]
    if opened:
        return {"type": "sequence", "elements": [*thoughts, then]}
    opening = {"type": "const_string", "value": reasoning.open}
    return {"type": "or", "elements": [{"type": "sequence", "elements": [opening, *thoughts, then]}, then]}
