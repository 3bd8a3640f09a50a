"""response_format and structured_outputs as the engine's constraint."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.entrypoints.api.completions import CompletionRequest
from octavo.entrypoints.chat.constraints import constraint, named_by
from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams
from tests.structured_output.languages import misjudged_by

Params = StructuredOutputsParams
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def schema(strict: bool | None, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": content, "strict": strict}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Params(json_object=True)),
        ({"response_format": schema(True, {"enum": [1]})}, Params(json={"enum": [1]})),
        ({"response_format": TAG}, Params(structural_tag=TAG)),
        ({"structured_outputs": {"regex": "a", "json": None}}, Params(regex="a")),
        ({"structured_outputs": {"choice": ["a"], "_backend": "xgrammar"}}, Params(choice=["a"])),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Params(regex="a")),
    ],
)
def test_what_is_meant(fields: dict[str, Any], expected: Params | None) -> None:
    assert constraint(request(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "parameter", "words"),
    [
        ({"response_format": {}}, "response_format", "got None"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format", "name, schema"),
        ({"response_format": schema("x", {})}, "response_format", "strict"),  # type: ignore[arg-type]
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "no field 'regexp'"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "a JSON object"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give one",
        ),
    ],
)
def test_what_is_wrong(fields: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        constraint(request(**fields))
    assert caught.value.parameter == parameter


def test_without_strict_what_cannot_be_enforced_is_left_to_the_model() -> None:
    for strict in (None, False):
        loose = constraint(request(response_format=schema(strict, UNIQUE)))
        assert loose is not None
        assert misjudged_by(loose, ["[1,2]", "[1,1]", "[]"], ["[3]"]) == []
        options = constraint(request(response_format=schema(strict, {"oneOf": [{"const": 1}, {"const": 2}]})))
        assert options is not None
        assert misjudged_by(options, ["1", "2"], ["3"]) == []
    exact = constraint(request(response_format=schema(True, UNIQUE)))
    assert exact is not None
    with pytest.raises(Exception, match="uniqueItems"):
        misjudged_by(exact, [], [])


@pytest.mark.parametrize(
    ("fields", "parameter", "message"),
    [
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json", "structured_outputs.json: no"),
        ({"response_format": schema(True, {})}, "response_format", "response_format.json_schema.schema: no"),
        ({}, "tools", "tools: no"),
    ],
)
def test_errors_name_what_the_client_wrote(fields: dict[str, Any], parameter: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught, named_by(request(**fields)):
        raise ValidationError("structured_outputs.json: no", parameter="structured_outputs.json")
    assert (caught.value.parameter, str(caught.value)) == (parameter, message)
    with pytest.raises(ValidationError) as other, named_by(request(**fields)):
        raise ValidationError("seed: no", parameter="seed")
    assert other.value.parameter == "seed"
