"""Faults under a real server: what clients are told, what the log says, and that the server is whole afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import patient
from tests.faults.faulty_core import OF_ONE_REQUEST, SECRET, Fault
from tests.server.running_server import RunningServer, running_server

CLIENT = patient.Client()  # one for all: making one takes as long as an answer
MODULE = "tests.faults.faulty_serve"
PLAIN = {"prompt": [9, 8, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = {"prompt": [5, 6], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
ERROR_ID = re.compile(r"[0-9a-f]{32}")
OPTIONS = {
    "backend": "reference",
    "served-model-name": "tiny",
    "kv-cache-memory": "2MiB",
    "max-core-restarts": "100",
    "core-restart-backoff": "0",
    "step-timeout": "2",
    "slow-client-timeout": "1",
}
FLAGS = [f"--{name}={value}" for name, value in OPTIONS.items()]


@pytest.fixture(scope="module")
def running(tiny_model: str) -> Iterator[tuple[RunningServer, str]]:
    with running_server(tiny_model, *FLAGS, module=MODULE) as server:
        server.wait_until_ready()
        yield server, plain(server)


@pytest.fixture
def server(running: tuple[RunningServer, str]) -> Iterator[RunningServer]:
    """One server for all; after each test it is healthy and idle, its pool is whole, and it answers as at first."""
    server, answer = running
    yield server
    server.wait_until(lambda: CLIENT.get(f"{server.url}/health").status_code == 200)
    server.wait_until_idle()
    assert plain(server) == answer
    server.wait_until_idle()


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return CLIENT.post(f"{server.url}{path}", json=fields)


def plain(server: RunningServer) -> str:
    answer = ask(server, **PLAIN)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"])


def stream(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> list[str]:
    """The data of all events."""
    body = fields | {"stream": True}
    with CLIENT.stream("POST", f"{server.url}{path}", json=body) as response:
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def error_of(events: list[str]) -> Any:
    """The error that ends a stream."""
    *_, error, done = events
    assert done == "[DONE]"
    return json.loads(error)["error"]


def log_lines(server: RunningServer, text: str) -> list[str]:
    """The log's lines that hold ``text``; waits for the first."""
    server.wait_for_line(f"({text})")
    return [line for line in server.lines if text in line]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fault", OF_ONE_REQUEST, ids=lambda fault: fault.name.lower())
def test_a_fault_of_one_request(server: RunningServer, fault: Fault, n: int, path: str) -> None:
    """Whole or streamed, it ends in an error whose id is in the log with the cause; its neighbours do not notice."""
    chat = path.endswith("chat/completions")
    asked: dict[str, Any] = {"max_tokens": 8, "seed": fault, "ignore_eos": True, "n": n}
    asked |= {"messages": [{"role": "user", "content": "the dog"}]} if chat else {"prompt": [4, 5, 6]}
    expected = plain(server)
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(plain, server) for _ in range(4)]
        whole = pool.submit(ask, server, path, **asked, request_id=f"mine-{fault}-{chat}-{n}")
        streamed = pool.submit(stream, server, path, **asked)
        assert {one.result() for one in neighbours} == {expected}
    assert whole.result().status_code == 500
    for error in (whole.result().json()["error"], error_of(streamed.result())):
        assert error["type"] == "InternalServerError"
        assert not re.search(rf"{SECRET}|ZeroDivision|Traceback|/|\.py", error["message"]), error
        found = ERROR_ID.search(error["message"])
        assert found, error
        # the request's own line of the log repeats what the client was told
        lines = [line for line in log_lines(server, found[0]) if f"error {found[0]}: " in line]
        assert len(lines) == 1
        assert SECRET in lines[0] or fault in (Fault.NAN, Fault.FORMAT)
    if fault not in (Fault.FORMAT,):  # an exception in a route is logged by the route
        assert f"mine-{fault}-{chat}-{n}" in server.output


def core_of(server: RunningServer) -> int:
    """Process id of the engine core."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (core,) = [pid for pid in children if b"faulty_core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(core)


def begin(pool: ThreadPoolExecutor, server: RunningServer, count: int, **fields: Any) -> list[Future[list[str]]]:
    """``count`` streams, all of which run."""
    started = server.metric("vllm:num_requests_running")
    jobs = [pool.submit(stream, server, **(LONG | fields)) for _ in range(count)]
    server.wait_until(lambda: server.metric("vllm:num_requests_running") >= started + count)
    return jobs


def test_kill_minus_nine_under_load(server: RunningServer) -> None:
    """Streams that have begun are told, the others are answered as if nothing had happened, n > 1 too."""
    whole: list[dict[str, Any]] = [PLAIN | {"prompt": [3, i], "max_tokens": 60} for i in range(6)]
    whole += [PLAIN | {"prompt": [4], "n": 3, "temperature": 1, "seed": 5, "max_tokens": 60}]
    expected = [ask(server, **one).json()["choices"] for one in whole]
    restarts = server.metric("octavo:core_restarts_total")
    with ThreadPoolExecutor(32) as pool:
        streams = begin(pool, server, 4)
        jobs = [pool.submit(ask, server, **one) for one in whole]
        os.kill(core_of(server), signal.SIGKILL)
        server.wait_until(lambda: CLIENT.get(f"{server.url}/health").status_code == 503)
        health = CLIENT.get(f"{server.url}/health")
        late = [pool.submit(ask, server, **one) for one in whole]
        assert health.json()["status"] == "restarting"
        for one in streams:
            error = error_of(one.result())
            assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
            assert ERROR_ID.search(error["message"])
        assert [job.result().json().get("choices") for job in jobs] == expected
        assert [job.result().json().get("choices") for job in late] == expected
    assert server.metric("octavo:core_restarts_total") == restarts + 1


@pytest.mark.parametrize("fault", [Fault.SEGFAULT, Fault.HANG], ids=["segfault", "hang"])
def test_a_request_that_ends_the_core_each_time(server: RunningServer, fault: Fault) -> None:
    expected = plain(server)
    asked: dict[str, Any] = {"prompt": [6, len(fault.name)], "seed": fault}
    with ThreadPoolExecutor(8) as pool:
        poison = pool.submit(ask, server, **asked)
        server.wait_until(lambda: CLIENT.get(f"{server.url}/health").status_code == 503)
        others = [pool.submit(plain, server) for _ in range(4)]
        assert {one.result() for one in others} == {expected}
        assert poison.result().status_code == 500
    assert "died twice" in poison.result().json()["error"]["message"]
    again = ask(server, **asked)
    assert (again.status_code, again.headers["x-should-retry"]) == (500, "false")
    assert "not taken in again" in again.json()["error"]["message"]


def test_a_stopped_core(server: RunningServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        os.kill(core_of(server), signal.SIGSTOP)
        assert pool.submit(plain, server).result()


def test_a_client_that_stops_reading(server: RunningServer) -> None:
    """It is dropped after the limit, and others run as ever. Logprobs make the answer larger than all buffers.

    Who closes the connection, the server's timer or the kernel's, is all the same.
    """
    expected = plain(server)
    large = {"messages": [{"role": "user", "content": "the dog"}], "n": 16, "logprobs": True, "top_logprobs": 20}
    large |= {"max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 1}
    body = json.dumps(large).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 16)
        assert plain(server) == expected
        server.wait_until(lambda: CLIENT.get(f"{server.url}/load").json()["server_load"] == 0)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := slow.recv(1 << 20):
                received += part
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_hundred_aborted_requests_leave_nothing(server: RunningServer) -> None:
    def leave(count: int) -> None:
        def one(number: int) -> None:
            fields = LONG | {"prompt": [number % 250 + 2] * 200, "n": 2, "temperature": 1, "logprobs": 5}
            with CLIENT.stream("POST", f"{server.url}/v1/completions", json=fields) as response:
                next(response.iter_lines())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(count)))
        server.wait_until_idle()

    pids = (server.process.pid, core_of(server))
    leave(200)  # caches fill, allocators find their size
    before = [memory(pid) for pid in pids]
    leave(200)
    assert [after - old < 8 << 20 for after, old in zip(map(memory, pids), before)] == [True, True]


def test_shutdown_with_a_core_that_hangs(tiny_model: str) -> None:
    """A second signal does not wait for anybody, and no process is left."""
    flags = ["--step-timeout=0", "--shutdown-timeout=1000"]
    with running_server(tiny_model, *FLAGS, *flags, module=MODULE) as server:
        server.wait_until_ready()
        core = core_of(server)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(ask, server, prompt=[6], seed=Fault.HANG)
            server.wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_line("(a second signal stops at once)")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            with contextlib.suppress(httpx.HTTPError):
                job.result()
        assert not Path(f"/proc/{core}").exists()
