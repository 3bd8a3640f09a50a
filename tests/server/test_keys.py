"""Who may call what: every route is guarded, keys come and go, and nobody aborts others' requests."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from octavo.config import ServerConfig
from octavo.entrypoints.app import OPEN_PATHS, build_app
from octavo.entrypoints.http.routing import require_admin
from octavo.entrypoints.server import access
from octavo.entrypoints.server.access import KeyRing
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.exceptions import ConfigError
from tests.server.fake_engine import FakeEngine

KEYS = ServerConfig(api_key=("one", "two"), admin_api_key=("root",), enable_docs_page=True)
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "request_id": "mine"}


def app_of(config: ServerConfig, engine: FakeEngine | None = None) -> FastAPI:
    return build_app(ServerState([ServedModel("m", engine=engine or FakeEngine())], config=config))  # type: ignore[arg-type]


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://octavo")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def every_route(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of all that the application answers; a kind of route that this cannot walk fails the test."""
    found = []

    def walk(routes: Any) -> None:
        for route in routes:
            if inner := getattr(getattr(route, "original_router", None), "routes", None):
                walk(inner)
                continue
            assert isinstance(route, Route | APIRoute), route
            found.extend((method, route.path.replace("{", "").replace("}", "")) for method in route.methods or ())

    walk(app.routes)
    assert ("POST", "/v1/chat/completions") in found
    assert ("GET", "/openapi.json") in found
    assert len(found) > 25
    return found


async def test_every_route_needs_a_key() -> None:
    app = app_of(KEYS)
    async with client_of(app) as client:
        for method, path in every_route(app):
            for headers in ({}, bearer("onee"), bearer(""), {"x-api-key": "On"}, {"Authorization": "one"}):
                status = (await client.request(method, path, headers=headers)).status_code
                assert (status != 401) == (path in OPEN_PATHS), (method, path, headers)
            for headers in (bearer("one"), bearer("root"), {"x-api-key": "two"}, {"x-api-key": "root"}):
                assert (await client.request(method, path, headers=headers)).status_code != 401, (method, path)
        for path in ("/", "/health/", "/HEALTH", "/health%2f..%2fv1/models", "/health;x", "/ping/x"):
            assert (await client.get(path)).status_code == 401
    assert {"/health", "/ping"} == OPEN_PATHS


async def test_metrics_are_public_by_choice() -> None:
    for choice, status in ((True, 200), (False, 401)):
        async with client_of(app_of(ServerConfig(api_key=("k",), public_metrics=choice))) as client:
            assert (await client.get("/metrics")).status_code == status


async def test_pages_that_load_foreign_scripts_are_served_on_request_only() -> None:
    for config, pages, document in (
        (ServerConfig(), 404, 200),
        (ServerConfig(enable_docs_page=True), 200, 200),
        (ServerConfig(disable_fastapi_docs=True), 404, 404),
    ):
        async with client_of(app_of(config)) as client:
            assert {(await client.get(path)).status_code for path in ("/docs", "/redoc")} == {pages}
            assert (await client.get("/openapi.json")).status_code == document


async def test_health_tells_strangers_no_reason() -> None:
    engine = FakeEngine()
    engine.dead = True
    async with client_of(app_of(KEYS, engine)) as client:
        assert (await client.get("/health")).json() == {"status": "dead"}
        assert "died" in (await client.get("/health", headers=bearer("one"))).json()["message"]


@pytest.mark.parametrize(("key", "aborted"), [("one", 1), ("root", 1), ("two", 0)])
async def test_a_request_is_aborted_by_its_own_key_or_the_administrators(key: str, aborted: int) -> None:
    engine = FakeEngine(delay=0.02)
    async with client_of(app_of(KEYS, engine)) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=LONG, headers=bearer("one")))
        while not engine.running:
            await asyncio.sleep(0.01)
        answer = await client.delete("/v1/requests/mine", headers=bearer(key))
        assert answer.status_code == (200 if aborted else 404)
        reason = (await asked).json()["choices"][0]["finish_reason"]
        assert reason == ("abort" if aborted else "length")


async def test_routes_for_administrators() -> None:
    for config, headers, status in (
        (KEYS, bearer("root"), 204),
        (KEYS, bearer("one"), 403),
        (ServerConfig(api_key=("one",)), bearer("one"), 403),
        (ServerConfig(admin_api_key=("root",)), {}, 403),
        (ServerConfig(admin_api_key=("root",)), bearer("root"), 204),
        (ServerConfig(), {}, 204),
    ):
        app = app_of(config)
        app.add_api_route("/admin", lambda: None, status_code=204, dependencies=[Depends(require_admin)])
        async with client_of(app) as client:
            answer = await client.get("/admin", headers=headers)
            assert answer.status_code == status
            if status == 403:
                assert "--admin-api-key" in answer.json()["error"]["message"]


def test_the_key_file_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "RECHECK_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(0, os.stat(path).st_mtime_ns + len(caplog.records) + 1))

    write("# keys of the team\n\nplain-key\r\n ann:k1\nann:k2\nbob: k:3 \n")
    ring = KeyRing(ServerConfig(api_key=("fixed",), api_key_file=str(path)))

    def name(key: str) -> str | None:
        caller = ring.find([key.encode()])
        return caller and caller.name

    assert [name(key) for key in ("k1", "k2", "k:3", "ann:k1", "bob", "")] == ["ann", "ann", "bob", None, None, None]
    assert (name("plain-key") or "").startswith("key-")
    assert name("plain-key") != name("fixed")
    write("ann:k9\n")
    assert [name(key) for key in ("k9", "k1", "plain-key")] == ["ann", None, None]
    for broken in ("", "# nothing\n", "ann:k1\nsome words\n", "ann:\n", ":k\n", "a b:k\n", "ann:k1\nbob:k1\n", "ä:k\n"):
        write(broken)
        assert (name("k9"), name("k1")) == ("ann", None)
    path.write_bytes(b"\xff\xfe\n")
    assert name("k9") == "ann"
    path.unlink()
    assert name("k9") == "ann"
    write("ann:k1\n")
    ring.reload()
    assert (name("k9"), name("k1")) == (None, "ann")
    assert not any(key in caplog.text for key in ("k1", "k9", "some words", "fixed"))
    assert "line 2" in caplog.text


def test_keys_from_a_pipe_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To open it again would wait for ever for somebody to write."""
    monkeypatch.setattr(access, "RECHECK_SECONDS", 0.0)
    path = tmp_path / "keys"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("ann:k1\n",))
    writer.start()
    ring = KeyRing(ServerConfig(api_key_file=str(path)))
    writer.join()
    for _ in range(2):
        caller = ring.find([b"k1"])
        assert caller is not None
        assert caller.name == "ann"
    assert caplog.text == ""
    ring.reload()
    assert ring.find([b"k1"]) is not None
    assert "no regular file" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"a b\n", b"\xff\n", b"x\nx\n"])
def test_a_wrong_key_file_stops_the_start(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        KeyRing(ServerConfig(api_key_file=str(path)))


def test_keys_show_nowhere() -> None:
    config = ServerConfig(api_key=("hidden-1",), admin_api_key=("hidden-2",))
    assert "hidden" not in f"{config!r} {vars(KeyRing(config))!r}"
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=("hidden",), admin_api_key=("hidden",))
    assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigError):
        ServerConfig(api_key="hidden")  # type: ignore[arg-type]
