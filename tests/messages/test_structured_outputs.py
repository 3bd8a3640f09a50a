"""StructuredOutputsParams says what is wrong with itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "parameter", "words"),
    [
        ({}, "structured_outputs", "got none"),
        ({"json_object": False}, "structured_outputs", "got none"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "got regex and choice"),
        ({"json": [1]}, "structured_outputs.json", "a JSON object"),
        ({"json": {1: 2}}, "structured_outputs.json", "a JSON object"),
        ({"json": "  "}, "structured_outputs.json", "more than white space"),
        ({"grammar": ""}, "structured_outputs.grammar", "more than white space"),
        ({"regex": 3}, "structured_outputs.regex", "a string"),
        ({"choice": []}, "structured_outputs.choice", "one or more"),
        ({"choice": [""]}, "structured_outputs.choice", "non-empty"),
        ({"choice": "abc"}, "structured_outputs.choice", "a list"),
        ({"choice": ["a"] * 100_000}, "structured_outputs.choice", "at most 10000 strings, got 100000"),
        ({"json_object": "yes"}, "structured_outputs.json_object", "true or false"),
        ({"regex": "a", "whitespace_pattern": 1}, "structured_outputs.whitespace_pattern", "a string"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json": True}, "json"),
        ({"json": {}}, "json"),
        ({"regex": ""}, "regex"),
        ({"json_object": True}, "json_object"),
    ],
)
def test_the_kind_is_the_one_that_is_set(fields: dict[str, Any], kind: str) -> None:
    params = StructuredOutputsParams(**fields)
    assert params.kind == kind
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params
