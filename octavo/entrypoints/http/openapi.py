"""The OpenAPI document: what each route answers and how it fails, from the very structs that are sent.

FastAPI describes the requests; answers are msgspec structs, which it does not know: each API lists its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REF = "#/components/schemas/{name}"


def _json(model: Any) -> dict[str, Any]:
    """The content that is one of ``model``: a struct, or a union of structs."""
    schemas = [{"$ref": REF.format(name=one.__name__)} for one in get_args(model) or (model,)]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def describe_answer(
    model: Any, *, stream: str | None = None, links: dict[str, Any] | None = None
) -> dict[int | str, Any]:
    """A route's ``responses``: ``model`` as JSON and, where ``stream`` says what its events are, server-sent events."""
    content = _json(model)
    if stream is not None:
        data = {"type": "string", "contentMediaType": "application/json"}
        event = {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}
        content["text/event-stream"] = {"schema": {**event, "description": stream}}
    first = (get_args(model) or (model,))[0]
    described: dict[str, Any] = {"description": (first.__doc__ or "").split("\n\n")[0], "content": content}
    if links:
        described["links"] = links
    return {200: described}


def failures(body: type) -> dict[int | str, Any]:
    """How every route of a router may fail."""
    refused = "refused: 400 a field, 401 the key, 404 the model or id, 413 the size, 429 too much at once"
    return {
        "4XX": {"description": refused, "content": _json(body)},
        "5XX": {"description": "500 it failed (the log has the id), 503 loading or dead", "content": _json(body)},
    }


def install_openapi(app: FastAPI, answers: Iterable[Any], *, guarded: bool, root_path: str) -> None:
    """Let ``app.openapi()`` have the schemas of all ``answers``, and the key's where one is needed."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            servers = [{"url": root_path}] if root_path else None
            document = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
            _, schemas = msgspec.json.schema_components(answers, ref_template=REF)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas)
            if guarded:
                components["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                }
                document["security"] = [{"bearer": []}, {"x-api-key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]
