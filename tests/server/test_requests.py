"""Ids of requests, aborting by them, load, times, forced usage, HEAD, and the bodies of 404 and 405."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.server.fake_engine import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
LONG: dict[str, Any] = {**CHAT, "max_tokens": 40}


def client_of(engine: FakeEngine, config: ServerConfig | None = None) -> httpx.AsyncClient:
    state = ServerState([ServedModel("m", engine=engine)], config=config or ServerConfig())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_app(state))
    return httpx.AsyncClient(transport=transport, base_url="http://octavo")


async def test_every_response_names_its_request() -> None:
    async with client_of(FakeEngine()) as client:
        for method, path in (("GET", "/health"), ("GET", "/nowhere"), ("POST", "/v1/chat/completions")):
            mine = await client.request(method, path, headers={"X-Request-Id": "mine-1"})
            assert mine.headers["x-request-id"] == "mine-1"
            fresh = {(await client.request(method, path)).headers["x-request-id"] for _ in range(2)}
            assert len(fresh) == 2
        odd = await client.get("/health", headers={"X-Request-Id": "a b"})
        assert odd.headers["x-request-id"] not in ("a b", "")
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine-2"})
        assert answer.json()["id"] == "chatcmpl-mine-2"
    async with client_of(FakeEngine(), ServerConfig(enable_request_id_headers=False)) as client:
        assert "x-request-id" not in (await client.get("/health")).headers


@pytest.mark.parametrize("name", ["chatcmpl-mine", "mine", "header"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_aborted_by_any_of_its_ids(name: str, stream: bool) -> None:
    engine = FakeEngine(delay=0.02)
    async with client_of(engine) as client:
        body = {**LONG, "stream": stream, "request_id": "mine"}
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "header"}))
        other = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20}))
        while engine.running < 2:
            await asyncio.sleep(0.01)
        assert (await client.get("/load")).json()["server_load"] == 2
        aborted = await client.delete(f"/v1/requests/{name}")
        assert aborted.json() == {"id": name, "object": "request.aborted", "aborted": 1}
        answer = await asked
        if stream:
            last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
            assert last["choices"][0]["finish_reason"] == "abort"
        else:
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        again = await client.delete(f"/v1/requests/{name}")
        assert (again.status_code, again.json()["error"]["param"]) == (404, "request_id")
        assert (await client.get("/load")).json() == {
            "server_load": 0,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
        }


async def test_an_id_given_twice_stands_for_both() -> None:
    engine = FakeEngine(delay=0.02)
    async with client_of(engine) as client:
        asked = [
            asyncio.create_task(client.post("/v1/chat/completions", json={**LONG, "request_id": "x"})) for _ in "ab"
        ]
        while engine.running < 2:
            await asyncio.sleep(0.01)
        assert (await client.delete("/v1/requests/x")).json()["aborted"] == 2
        for answer in await asyncio.gather(*asked):
            assert answer.json()["choices"][0]["finish_reason"] == "abort"


TIMES = {
    "time_to_first_token_ms": 1000.0,
    "generation_time_ms": 1000.0,
    "queue_time_ms": 500.0,
    "mean_itl_ms": 500.0,
    "tokens_per_second": 2.0,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_times_come_on_request(path: str) -> None:
    body = {**CHAT, "prompt": "x"} if path.endswith("/v1/completions") else CHAT
    async with client_of(FakeEngine()) as client:
        assert "metrics" not in (await client.post(path, json=body)).json()
        asked = {**body, "return_metrics": True}
        assert (await client.post(path, json=asked)).json()["metrics"] == TIMES
        assert (await client.post(path, json={**asked, "n": 2})).json()["metrics"] is None
        *chunks, last, done, end = (await client.post(path, json={**asked, "stream": True})).text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        final = json.loads(last.removeprefix("data: "))
        assert (final["choices"], final["metrics"]) == ([], TIMES)
        assert all("metrics" not in json.loads(chunk.removeprefix("data: ")) for chunk in chunks)
    async with client_of(FakeEngine(), ServerConfig(enable_per_request_metrics=True)) as client:
        assert (await client.post(path, json=body)).json()["metrics"] == TIMES


async def test_usage_can_be_forced_on_streams() -> None:
    async with client_of(FakeEngine(), ServerConfig(enable_force_include_usage=True)) as client:
        text = (await client.post("/v1/chat/completions", json={**CHAT, "stream": True})).text
        last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


async def test_head_is_get_without_its_body() -> None:
    async with client_of(FakeEngine()) as client:
        for path in (
            "/health",
            "/ping",
            "/version",
            "/metrics",
            "/load",
            "/v1/models",
            "/v1/models/m",
            "/openapi.json",
        ):
            head, get = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]
        assert (await client.head("/v1/chat/completions")).status_code == 405


async def test_what_the_router_refuses_has_a_body_too() -> None:
    async with client_of(FakeEngine()) as client:
        missing = await client.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "there is no route GET /v1/nothing"
        wrong = await client.request("DELETE", "/ping")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, POST")
        assert wrong.json()["error"]["type"] == "MethodNotAllowedError"
        theirs = await client.post("/v1/messages/nothing")
        assert theirs.json()["type"] == "error"
        assert theirs.json()["error"]["type"] == "not_found_error"


async def test_the_key_comes_in_either_header() -> None:
    async with client_of(FakeEngine(), ServerConfig(api_key=("k",))) as client:
        for headers in (
            {"Authorization": "Bearer k"},
            {"x-api-key": "k"},
            {"Authorization": "Bearer z", "x-api-key": "k"},
        ):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": "kk"}, {"Authorization": "k"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        refused = await client.post("/v1/messages", json={})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
