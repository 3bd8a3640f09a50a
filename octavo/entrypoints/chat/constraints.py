"""What the text of an answer is held to: a format that the request wants, calls that it demands, thinking before both.

Calls are written as the model's own format has them, so one parser reads them, free or forced.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.entrypoints.chat.parsers.formats import CallSyntax, ReasoningFormat
from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.structural_tag import Tag, tool_calls

if TYPE_CHECKING:
    from octavo.entrypoints.chat.prompts import ChatSetup

WHERE = {"json": "response_format.json_schema.schema", "structural_tag": "response_format"}
ANY_OBJECT = {"type": "object"}
SPACE_AFTER_THINKING = r"\s{0,2}"
SPACE_IN_ARGUMENTS = r" ?"  # small models would else go on with white space for ever

Format = dict[str, Any]  # of a structural tag


class Formatted(Protocol):
    """What says how a text must look: OpenAI's ``response_format``, or vLLM's ``structured_outputs``."""

    @property
    def response_format(self) -> Mapping[str, Any] | None: ...
    @property
    def structured_outputs(self) -> dict[str, Any] | None: ...


def constraint(request: Formatted) -> StructuredOutputsParams | None:
    """The constraint of a request, None without one. Raises ValidationError naming the field."""
    form, given = request.response_format, request.structured_outputs
    wanted = None if form is None else _of_format(form)
    if given is None:
        return wanted
    if wanted is not None:
        raise ValidationError(
            "response_format and structured_outputs both constrain the text; give one", parameter="structured_outputs"
        )
    return StructuredOutputsParams.of(given)


def _of_format(form: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(form))
    if kind != "json_schema":
        raise ValidationError(
            f"response_format.type must be text, json_object, json_schema or structural_tag, got {kind!r:.60}",
            parameter="response_format",
        )
    wrapper = form.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(wrapper, Mapping) or not isinstance(schema, Mapping):
        raise ValidationError(
            "response_format.json_schema must be an object with name, schema and perhaps strict",
            parameter="response_format",
        )
    strict = wrapper.get("strict")
    if not isinstance(strict, bool | None):
        raise ValidationError("response_format.json_schema.strict must be true or false", parameter="response_format")
    if strict:
        return StructuredOutputsParams(json=dict(schema))
    # best effort, as in OpenAI's API: what a grammar cannot enforce is left to the model
    options = schema.get("x-guidance")
    lenient = {**(options if isinstance(options, Mapping) else {}), "lenient": True}
    return StructuredOutputsParams(json={**schema, "x-guidance": lenient})


@contextlib.contextmanager
def named_by(request: Formatted) -> Iterator[None]:
    """Within, errors about a constraint name ``response_format``, or ``tools``, where it came from there."""
    try:
        yield
    except ValidationError as error:
        field = error.parameter or ""
        if request.structured_outputs is not None or not field.startswith("structured_outputs"):
            raise
        source = "tools" if request.response_format is None else "response_format"
        where = source if source == "tools" else WHERE.get(field.removeprefix("structured_outputs."), source)
        raise ValidationError(str(error).replace(field, where, 1), parameter=source) from error


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
