"""The OpenAPI document is whole, and requests generated from it never make the server fail or break its word."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings

from octavo.config import ServerConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.server.fake_engine import FakeEngine

# a request may fit the schema and still not the model, so what fits may be refused; the body's limit comes first of all
CONFIG = """
[checks.positive_data_acceptance]
enabled = false
[checks.negative_data_rejection]
expected-statuses = ["4xx"]
[phases.coverage]
enabled = false
"""
OPTIONS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def make_app(config: ServerConfig | None = None) -> FastAPI:
    return build_app(ServerState([ServedModel("m", engine=FakeEngine())], config=config or ServerConfig()))  # type: ignore[arg-type]


app = make_app()
schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=schemathesis.Config.from_str(CONFIG))
document: dict[str, Any] = app.openapi()


@schema.parametrize()
@settings(max_examples=40, **OPTIONS)
def test_any_request(case: Any) -> None:
    case.call_and_validate()


test_any_chain_of_requests = schema.as_state_machine().TestCase
test_any_chain_of_requests.settings = settings(max_examples=25, stateful_step_count=6, **OPTIONS)


def references(value: Any) -> set[str]:
    """All $ref in ``value``."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_reference_resolves() -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(json.loads(json.dumps(document))) <= known


@pytest.mark.parametrize(
    ("path", "method", "operation"),
    [(path, method, operation) for path, item in document["paths"].items() for method, operation in item.items()],
)
def test_every_route_says_what_it_answers(path: str, method: str, operation: dict[str, Any]) -> None:
    answered = operation["responses"]
    assert {"200", "4XX", "5XX"} <= set(answered)
    assert "422" not in answered
    kinds = answered["200"]["content"]
    assert all(content["schema"] for content in kinds.values())
    body = "AnthropicErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
    for status in ("4XX", "5XX"):
        (content,) = answered[status]["content"].values()
        assert content["schema"] == {"$ref": f"#/components/schemas/{body}"}
    if method == "post" and path != "/ping":
        assert operation["requestBody"]["content"]["application/json"]["schema"]
    assert operation["description"]


def test_a_key_is_in_the_document_where_one_is_needed() -> None:
    assert "security" not in document
    guarded = make_app(ServerConfig(api_key=("k",))).openapi()
    assert guarded["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert set(guarded["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
