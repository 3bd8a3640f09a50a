"""What clients are told when there is too much to do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import ServerConfig, TenantLimits, TenantTable
from octavo.engine.tenants import Tenants
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.exceptions import DeadlineError, DeadlyRequestError, OverloadedError
from tests.server.fake_engine import FakeEngine
from tests.server.test_requests import client_of

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    route: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = FakeEngine()
    engine.overload = OverloadedError("too much is waiting", reason="max_num_queued_reqs", retry_after=2.1)
    async with client_of(engine) as client:
        answer: httpx.Response = await client.post(route, json={**ROUTES[route], "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        error = answer.json()["error"]
        assert error["message"] == "too much is waiting"
        assert error["type"] == ("rate_limit_error" if route == "/v1/messages" else "RateLimitError")
        engine.overload = OverloadedError("too much is waiting", reason="max_num_queued_reqs")
        assert (await client.post(route, json=ROUTES[route])).headers["retry-after"] == "1"
        assert f"POST {route} 429" in caplog.text
        assert "RateLimitError: max_num_queued_reqs" in caplog.text
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        engine.overload = None
        assert (await client.post(route, json=ROUTES[route])).status_code == 200


def tenant_client(engine: FakeEngine, **fields: Any) -> httpx.AsyncClient:
    config = ServerConfig(api_key=("one", "two"), **fields)
    return client_of(engine, config)


async def test_the_key_says_whose_a_request_is(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("acme:k1\nacme:k2\nzeta:k3\n")
    engine = FakeEngine()
    async with tenant_client(engine, api_key_file=str(tmp_path / "keys")) as client:
        for key in ("k1", "k2", "k3", "one"):
            more = {"Authorization": f"Bearer {key}", "X-Tenant": "forged"}
            body = {**ROUTES["/v1/completions"], "user": "forged"}
            assert (await client.post("/v1/completions", json=body, headers=more)).status_code == 200
    assert engine.tenants[:3] == ["acme", "acme", "zeta"]
    assert engine.tenants[3].startswith("key-")


async def test_a_trusted_header_says_it_where_that_was_configured() -> None:
    engine = FakeEngine()
    async with tenant_client(engine, tenant_header="X-Tenant") as client:
        key = {"Authorization": "Bearer one"}
        body = ROUTES["/v1/chat/completions"]
        for told in ({"X-Tenant": "a.b-c_1"}, {}):
            answer = await client.post("/v1/chat/completions", json=body, headers={**key, **told})
            assert answer.status_code == 200
        for odd in ("", "a b", "a" * 65, "a,b"):
            answer = await client.post("/v1/chat/completions", json=body, headers={**key, "X-Tenant": odd})
            assert (answer.status_code, "x-tenant" in answer.text) == (400, True)
        twice = [("Authorization", "Bearer one"), ("X-Tenant", "a"), ("X-Tenant", "b")]
        assert (await client.post("/v1/chat/completions", json=body, headers=twice)).status_code == 400
    assert engine.tenants[0] == "a.b-c_1"
    assert engine.tenants[1].startswith("key-")
    assert len(engine.tenants) == 2


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
async def test_a_tenants_bounds_are_a_400_that_names_them(route: str, field: str) -> None:
    engine = FakeEngine()
    engine.table = Tenants(TenantTable(default=TenantLimits(max_tokens=5, priority=(0, 3))))
    async with client_of(engine) as client:
        body = {**ROUTES[route], field: 6}
        answer = await client.post(route, json=body)
        assert answer.status_code == 400
        assert "at most 5 for this tenant, got 6" in answer.json()["error"]["message"]
        assert field in answer.json()["error"]["message"] or answer.json()["error"].get("param") == field
        assert (await client.post(route, json={**body, field: 5})).status_code == 200
        assert (await client.post("/v1/chat/completions", json={"messages": MESSAGES})).status_code == 200
        assert engine.seen[-1].max_tokens == 5
        refused = await client.post("/v1/completions", json={"prompt": "a", "priority": -1, "max_tokens": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


async def test_a_draining_server_sends_new_clients_elsewhere() -> None:
    engine = FakeEngine(delay=0.02)
    state = ServerState([ServedModel("m", engine=engine)])  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 9}))
        while not engine.running:
            await asyncio.sleep(0.01)
        state.draining = True
        for path, status in (("/health", "draining"), ("/ping", "draining")):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, status)
            assert answer.headers["connection"] == "close"
        assert (await client.post("/ping")).json()["status"] == "draining"
        for route, body in ROUTES.items():
            answer = await client.post(route, json=body)
            assert answer.status_code == 503
            assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "5")
            kind = answer.json()["error"]["type"]
            assert kind == ("overloaded_error" if route == "/v1/messages" else "ServiceUnavailableError")
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/load")).json()["server_load"] == 1
        done = await running
        assert (done.status_code, done.json()["usage"]["completion_tokens"]) == (200, 9)


@pytest.mark.parametrize("route", ROUTES)
async def test_timeouts_in_body_and_header(route: str) -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        for header, own, expected in ((None, 5.5, 5.5), ("7", None, 7.0), ("7.25", 30, 7.25), (None, None, None)):
            body = ROUTES[route] if own is None else {**ROUTES[route], "timeout": own}
            headers = {} if header is None else {"X-Request-Timeout": header}
            assert (await client.post(route, json=body, headers=headers)).status_code == 200
            assert engine.timeouts[-1] == expected
        for odd in ("", "-1", "nan", "1e9", "10s", "99999999"):
            answer = await client.post(route, json=ROUTES[route], headers={"X-Request-Timeout": odd})
            assert (answer.status_code, "X-Request-Timeout" in answer.text) == (400, True)
        for value in (0, -3, 1e9):
            answer = await client.post(route, json={**ROUTES[route], "timeout": value})
            assert answer.status_code == 400
            assert "timeout must be more than 0" in answer.json()["error"]["message"]


async def test_a_missed_deadline_is_a_504_that_clients_do_not_repeat() -> None:
    engine = FakeEngine()
    engine.fail_after, engine.failure = 1, DeadlineError("not finished")
    async with client_of(engine) as client:
        body = {"messages": MESSAGES, "max_tokens": 4}
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed.status_code == 200
    events = streamed.text.strip().split("\n\n")
    assert '"code":504' in events[-2]
    assert events[-1] == "data: [DONE]"
    engine.fail_after = 0
    async with client_of(engine) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "TimeoutError")
        assert answer.headers["x-should-retry"] == "false"
        engine.failure = DeadlyRequestError("the engine core died twice")
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")


@pytest.mark.parametrize("route", ROUTES)
async def test_time_spent_on_a_constraint_is_the_requests_own(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, arrived, checked = FakeEngine(), list[float](), list[float]()
    generate = engine.generate

    async def check_constraint(params: Any) -> None:
        checked.append(time.monotonic())

    def noting(*args: Any, arrival_time: float, **kwargs: Any) -> Any:
        arrived.append(arrival_time)
        return generate(*args, **kwargs)

    monkeypatch.setattr(engine, "check_constraint", check_constraint)
    monkeypatch.setattr(engine, "generate", noting)
    began = time.monotonic()
    async with client_of(engine) as client:
        assert (await client.post(route, json=ROUTES[route])).status_code == 200
    assert all(began < when < checked[0] for when in arrived)
    assert arrived


async def test_beams_count_in_the_bound_on_sequences() -> None:
    body = {"prompt": ["a"] * 33, "n": 1, "best_of": 32, "use_beam_search": True, "temperature": 0}
    async with client_of(FakeEngine()) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "33 entries and n (or best_of) is 32; their product may be at most 1024" in answer.json()["error"]["message"]
