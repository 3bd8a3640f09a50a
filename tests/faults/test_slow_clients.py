"""Clients that send too slowly, too much, or do not read: each is ended within its limits, and delays nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.api.shared.errors import OPENAI
from octavo.entrypoints.chat.generation import merge
from octavo.entrypoints.http.connection import timed_protocol
from octavo.entrypoints.http.routing import MAX_VALUES, check_number_of_values

LIMIT = 0.3
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class App:
    """POST / answers with the number of bytes it got; GET / streams 64 KiB blocks until the client is gone."""

    def __init__(self) -> None:
        self.disconnects = 0
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "POST":
                body = await Request(scope, receive).body()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": str(len(body)).encode()})
                return
        except ClientDisconnect:
            self.disconnects += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(self._until_gone(receive))
        while not gone.done():
            self.sent += 1
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await asyncio.sleep(0)
        self.disconnects += 1

    @staticmethod
    async def _until_gone(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.fixture
def app() -> App:
    return App()


@contextlib.asynccontextmanager
async def serving(app: App, protocol: type[asyncio.Protocol]) -> AsyncIterator[Connect]:
    """Connections to a server. At the end it has no connection left."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off")
    config.h11_max_incomplete_event_size = 65536
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))

    async def open_connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, limit=65536)

    yield open_connection
    async with asyncio.timeout(20):
        while server.server_state.connections:
            await asyncio.sleep(0.01)
    server.should_exit = True
    await task


@pytest_asyncio.fixture
async def connect(app: App) -> AsyncIterator[Connect]:
    """Connections with short limits."""
    async with serving(app, timed_protocol(OPENAI, LIMIT, LIMIT)) as open_connection:
        yield open_connection


async def test_one_connection_too_many(app: App) -> None:
    """It is told so, and the others are not disturbed; when one of them ends, there is room."""
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
    async with serving(app, timed_protocol(OPENAI, 0, 0, 3)) as connect:
        opened = [await connect() for _ in range(3)]
        for reader, writer in [*opened, *opened]:
            writer.write(post)
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        reader, writer = await connect()
        refused = await reader.read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"has 3 connections open" in refused
        writer.close()
        opened.pop()[1].close()
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200 "):  # until the server has seen the end of the third
            writer.close()
            reader, writer = await connect()
            with contextlib.suppress(ConnectionError):
                writer.write(post)
                answer = await reader.readline()
        for _, one in [*opened, (reader, writer)]:
            one.close()


async def test_a_connection_that_says_nothing(connect: Connect) -> None:
    reader, writer = await connect()
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize("piece", [b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nX: "])
async def test_headers_that_never_end(connect: Connect, piece: bytes) -> None:
    """Each byte in time, all of them too late; what is sent after the refusal does not keep it from being read."""
    reader, writer = await connect()
    writer.write(piece)
    answer = asyncio.create_task(reader.read())
    while not answer.done():
        with contextlib.suppress(ConnectionError):
            writer.write(b"a")
        await asyncio.sleep(LIMIT / 10)
    assert b"408" in await answer
    writer.close()


async def test_headers_beyond_any_measure(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X-A: " + b"a" * 200_000)
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"larger than 65536 bytes" in answer
    writer.close()


async def test_what_is_no_request_is_told_why_and_logged_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await connect()
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"illegal request line" in answer
    assert len(caplog.records) == 1
    writer.close()


async def test_a_body_that_never_ends(connect: Connect, app: App) -> None:
    reader, writer = await connect()
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n")
    answer = asyncio.create_task(reader.read())
    while not answer.done():
        with contextlib.suppress(ConnectionError):
            writer.write(b"a")
        await asyncio.sleep(LIMIT / 10)
    assert b"body did not arrive" in await answer
    writer.close()
    while not app.disconnects:
        await asyncio.sleep(0.01)


async def test_requests_one_after_the_other_take_their_time(connect: Connect) -> None:
    """The limits are those of each request, not of the connection; trailers are read over."""
    reader, writer = await connect()
    for _ in range(4):
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        for piece in (head[:20], head[20:], b"3\r\nabc\r\n", b"0\r\nX-Trailer: 1\r\n\r\n"):
            writer.write(piece)
            await asyncio.sleep(LIMIT / 4)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"0\r\n\r\n")) == b"1\r\n3\r\n0\r\n\r\n"
        await asyncio.sleep(LIMIT * 1.5)
    writer.close()


async def test_a_client_that_does_not_read(connect: Connect, app: App) -> None:
    """What waits for it is bounded; then it is dropped, and the work ends. Another client is served meanwhile."""
    _, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    slow: Any = writer.transport
    slow.pause_reading()
    while not app.disconnects:
        other_reader, other = await connect()
        other.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab")
        assert (await other_reader.read()).startswith(b"HTTP/1.1 200")
        other.close()
        await asyncio.sleep(0.01)
    assert app.sent * 65536 < 64 << 20
    writer.close()


async def test_a_client_that_reads_slowly_is_let_be(connect: Connect, app: App) -> None:
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    until = time.monotonic() + 4 * LIMIT
    while time.monotonic() < until:
        assert await reader.read(1 << 20)
        await asyncio.sleep(LIMIT / 10)
    assert app.disconnects == 0
    writer.transport.abort()


# ---- several streams in one answer


async def test_streams_of_one_answer_wait_where_they_are_merged() -> None:
    """A reader that stops after one item leaves all but a few of the others with their streams."""
    produced = 0

    async def stream() -> AsyncIterator[int]:
        nonlocal produced
        for number in range(1000):
            produced += 1
            yield number

    merged = merge([stream(), stream(), stream()])
    await anext(merged)
    for _ in range(50):
        await asyncio.sleep(0)
    assert produced <= 10
    rest = [item async for _, item in merged]
    assert sorted([*rest, 0]) == sorted([*range(1000)] * 3)


# ---- bodies of very many values


@pytest.mark.parametrize("value", [b"[]", b"{}", b'""', b'[{"a":1}]'])
def test_too_many_values_are_refused_before_they_are_made(value: bytes) -> None:
    with pytest.raises(HTTPException) as refused:
        check_number_of_values(b"[" + b",".join([value] * (MAX_VALUES + 1)) + b"]")
    assert refused.value.status_code == 400
    assert str(MAX_VALUES) in refused.value.detail


def test_what_only_looks_like_many_values() -> None:
    text = '{"[\\"[,' * 400_000
    check_number_of_values(json.dumps({"prompt": text}).encode())
    check_number_of_values(json.dumps({"prompt": [1] * 2_000_000}).encode())
    check_number_of_values(b"[" + b",".join([b'"a"'] * (MAX_VALUES - 1)) + b"]")
    check_number_of_values(b'"' + b'ab\\"[' * 1_000_000)  # cut off: no search may begin anew at each of its quotes


async def test_the_route_says_so() -> None:
    from octavo.entrypoints.app import build_app
    from octavo.entrypoints.server.state import ServedModel, ServerState
    from tests.server.fake_engine import FakeEngine

    state = ServerState([ServedModel("m", FakeEngine())])  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = b'{"prompt":[' + b"[]," * 3_000_000 + b"[]]}"
        answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert str(MAX_VALUES) in answer.json()["error"]["message"]
