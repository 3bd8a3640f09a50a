"""The tools of a conversation: their bounds, and what ``tool_choice`` makes of them.

Tools are plain objects as in OpenAI's API, ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
Knows nothing of how calls are written; see ``parsers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.entrypoints.chat.parsers.formats import Tools
from octavo.exceptions import ValidationError

MAX_TOOLS_BYTES = 1024 * 1024  # of all tools as JSON
MAX_SCHEMA_DEPTH = 64
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

Tool = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any]  # none, auto, required, or {"type": "function", "function": {"name": ...}}


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of its tools.

    ``shown``: the tools as the template gets them. ``schemas``: those that may be called; empty where calls are not
    looked for. ``demanded``: at least one call must come. ``strict``: the functions whose arguments must follow their
    schema. ``named``: the one function that ``tool_choice`` named.
    """

    shown: Sequence[Mapping[str, Any]]
    schemas: Tools
    demanded: bool = False
    named: str | None = None
    strict: frozenset[str] = frozenset()


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, *, show_uncalled: bool) -> ToolUse:
    """Check the tools and apply ``tool_choice``. ``show_uncalled``: the template gets them with ``none`` too.

    Raises ValidationError naming the tool and the field.
    """
    named = None if choice is None or isinstance(choice, str) else str(choice["function"]["name"])
    if not tools:
        if choice in (None, "none", "auto"):
            return ToolUse((), {})
        raise ValidationError(f"tool_choice {named or repr(choice)} needs tools", parameter="tool_choice")
    functions = [_function(index, tool) for index, tool in enumerate(tools)]
    shown = [_shown(tool, function) for tool, function in zip(tools, functions, strict=True)]
    size = len(msgspec.json.encode(shown))
    if size > MAX_TOOLS_BYTES:
        raise ValidationError(f"tools: {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are allowed", parameter="tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, function in enumerate(functions):
        name, field = function["name"], f"tools[{index}].function"
        if name in schemas:
            raise ValidationError(f"{field}.name: {name!r} is there twice", parameter=f"{field}.name")
        schemas[name] = _parameters(function.get("parameters") or {}, f"{field}.parameters")
    if choice == "none":
        return ToolUse(shown if show_uncalled else (), {})
    strict = frozenset(function["name"] for function in functions if function.get("strict"))
    if named is not None:
        if named not in schemas:
            raise ValidationError(
                f"tool_choice names {named!r}, which is not among the tools ({', '.join(list(schemas)[:20])})",
                parameter="tool_choice",
            )
        return ToolUse(shown, {named: schemas[named]}, demanded=True, named=named, strict=strict)
    return ToolUse(shown, schemas, demanded=choice == "required", strict=strict)


def _function(index: int, tool: Tool) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValidationError(f"tools[{index}] must have a function with a name", parameter="tools")
    return function


def _shown(tool: Tool, function: Mapping[str, Any]) -> dict[str, Any]:
    """The tool as templates print it: what the client sent, without what does not concern the model."""
    kept = {name: value for name, value in function.items() if name != "strict" and value is not None}
    return {"type": tool.get("type", "function"), "function": kept}


def _parameters(schema: dict[str, Any], field: str) -> dict[str, Any]:
    """``schema`` as the schema of an object, checked as far as that needs no compiler."""
    if schema.get("type", "object") != "object":
        raise ValidationError(f"{field}.type must be 'object', got {_short(schema['type'])}", parameter=field)
    _check_schema(schema, field, field, MAX_SCHEMA_DEPTH)
    return {"type": "object", **schema}


def _check_schema(schema: Any, path: str, field: str, depth: int) -> None:
    """Types, properties, items and alternatives have the shape that JSON Schema gives them."""

    def check(ok: bool, where: str, rule: str) -> None:
        if not ok:
            raise ValidationError(f"{path}{where} must be {rule}", parameter=field)

    check(depth > 0, "", f"nested at most {MAX_SCHEMA_DEPTH} deep")
    if isinstance(schema, bool):
        return
    check(isinstance(schema, dict), "", "a JSON schema (an object)")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        check(isinstance(kind, str) and kind in TYPES, ".type", f"one of {', '.join(TYPES)}, got {_short(kind)}")
    required = schema.get("required", [])
    check(isinstance(required, list) and all(isinstance(n, str) for n in required), ".required", "a list of names")
    check(isinstance(schema.get("enum", [0]), list) and schema.get("enum") != [], ".enum", "a list, and not empty")
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        inner = schema.get(key, {})
        check(isinstance(inner, dict), f".{key}", "an object of schemas")
        for name, one in inner.items():
            _check_schema(one, f"{path}.{key}.{_short(name, quote=False)}", field, depth - 1)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key, [])
        check(isinstance(inner, list) and (key not in schema or bool(inner)), f".{key}", "a list of schemas, not empty")
        for index, one in enumerate(inner):
            _check_schema(one, f"{path}.{key}[{index}]", field, depth - 1)
    for key in ("items", "additionalProperties", "not"):
        if key in schema:
            _check_schema(schema[key], f"{path}.{key}", field, depth - 1)


def _short(value: Any, *, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
