"""What a request wants its text to look like: OpenAI's ``response_format``, or vLLM's ``structured_outputs``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams

WHERE = {"json": "response_format.json_schema.schema", "structural_tag": "response_format"}


def constraint(request: GenerationRequest) -> StructuredOutputsParams | None:
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
def named_by(request: GenerationRequest) -> Iterator[None]:
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
