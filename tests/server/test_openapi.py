"""Requests generated from the server's own OpenAPI document never make it fail (no 5xx)."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from octavo.entrypoints.openai.app import build_app
from octavo.entrypoints.state import ServerState
from tests.server.fake_engine import FakeEngine

schema = schemathesis.openapi.from_asgi("/openapi.json", build_app(ServerState("m", engine=FakeEngine())))  # type: ignore[arg-type]


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_makes_the_server_fail(case: Any) -> None:
    case.call_and_validate(checks=[not_a_server_error])
