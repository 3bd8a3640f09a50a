"""What is wrong with a field, in words: where it is, what it must be, and what came instead.

Pydantic reports each alternative of a union by itself and names its own types; here one sentence is made of them, about
the most telling place. Knows no route.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

SHOWN_CHARS = 48

# pydantic's error type -> what the value must be; {} are its context
RULES = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "may have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} character(s)",
    "too_long": "may have at most {max_length} items",
    "too_short": "must have at least {min_length} item(s)",
    "union_tag_invalid": "must have {discriminator} {expected_tags}",
    "union_tag_not_found": "must have the field {discriminator}",
    "extra_forbidden": "is not a field that is known here",
}
KINDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "an array",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}


def describe_fields(errors: Sequence[Any], body: Any) -> tuple[str, str | None]:
    """(message, top-level field) of pydantic's ``errors`` about the decoded ``body``."""
    if errors[0]["type"] == "json_invalid":
        return f"the body is not valid JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}", None
    places = [_place(error, body) for error in errors]
    field = next((place[0] for place in places if place), None)
    related = [(e, p) for e, p in zip(errors, places, strict=True) if p[:1] == ([] if field is None else [field])]
    deepest = max(len(place) for _, place in related)
    found = [(e, p) for e, p in related if len(p) == deepest]
    # in a union, an alternative whose kind is right says more than one whose kind is wrong
    found = [(e, p) for e, p in found if e["type"] not in KINDS] or found
    error, place = found[0]
    same = [e for e, p in found if p == place]
    where = _written(place) or "the body"
    if error["type"] == "missing":
        return f"{where}: is required", _name(field)
    if error["type"] in KINDS:
        rule = "must be " + " or ".join(dict.fromkeys(KINDS[e["type"]] for e in same))
    else:
        rule = "; ".join(dict.fromkeys(map(_rule, same)))
        if error["type"] == "value_error":  # its author says what came
            return f"{where}: {rule}", _name(field)
    return f"{where}: {rule}, got {shown(error['input'])}", _name(field)


def shown(value: Any) -> str:
    """``value``, briefly and on one line."""
    if isinstance(value, str):
        more = f"... ({len(value)} characters)" if len(value) > SHOWN_CHARS else ""
        return json.dumps(value[:SHOWN_CHARS]) + more
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return str(value)[:SHOWN_CHARS]


def _rule(error: dict[str, Any]) -> str:
    pattern = RULES.get(error["type"])
    if pattern is not None:
        return pattern.format(**error.get("ctx", {}))
    return str(error["msg"]).removeprefix("Value error, ")


def _place(error: dict[str, Any], body: Any) -> list[str | int]:
    """Where in ``body`` the error is; pydantic's path also names the alternatives of unions that it tried."""
    place: list[str | int] = []
    parts = error["loc"]
    for number, part in enumerate(parts, 1):
        inner = _items(body)
        if part in inner:
            body = inner[part]
        elif number < len(parts) or error["type"] != "missing":
            continue
        place.append(part)
    return place


def _items(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}


def _written(place: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_name(part)}" for part in place)
    return text.removeprefix(".")


def _name(part: Any) -> str | None:
    return None if part is None else str(part)[:SHOWN_CHARS]
