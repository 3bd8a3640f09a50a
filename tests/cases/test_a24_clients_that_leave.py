"""A24: when the client goes away its work stops, whatever it was, wherever it was; and nobody else notices."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import patient
from tests.cases.asking import answered, ask
from tests.server.running_server import RunningServer

TOKENS = 900
GREEDY = {"ignore_eos": True, "temperature": 0}
CHAT = [{"role": "user", "content": "Count to a thousand."}]

# what is asked -> (path, body, the sequences it comes to)
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "whole": ("/v1/completions", {"prompt": "One,", "max_tokens": TOKENS, **GREEDY}, 1),
    "stream": ("/v1/completions", {"prompt": "One,", "max_tokens": TOKENS, "stream": True, **GREEDY}, 1),
    "four samples": ("/v1/completions", {"prompt": "One,", "max_tokens": TOKENS, "n": 4, **GREEDY}, 4),
    "a batch": ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": TOKENS, **GREEDY}, 3),
    "a streamed batch": (
        "/v1/completions",
        {"prompt": ["a", "b", "c"], "max_tokens": TOKENS, "stream": True, **GREEDY},
        3,
    ),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": TOKENS, **GREEDY}, 1),
    "a response": ("/v1/responses", {"input": CHAT, "max_output_tokens": TOKENS, **GREEDY}, 1),
    "a message": ("/v1/messages", {"messages": CHAT, "max_tokens": TOKENS, "stream": True, **GREEDY}, 1),
    "a long prompt": ("/v1/completions", {"prompt": "word " * 950, "max_tokens": 50, **GREEDY}, 1),
}


def aborts(server: RunningServer) -> float:
    return server.metric("vllm:request_success_total", finished_reason="abort")


@contextlib.contextmanager
def asked(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Within, the request has been sent; then its socket closes, whatever has been answered."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    try:
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ASKED)
def test_the_work_stops(live_server: RunningServer, kind: str) -> None:
    path, body, sequences = ASKED[kind]
    before, made = aborts(live_server), live_server.metric("vllm:generation_tokens_total")
    with asked(live_server, path, body):
        live_server.wait_until(lambda: live_server.metric("vllm:num_requests_running") == sequences)
    live_server.wait_until_idle()
    assert aborts(live_server) - before == sequences
    assert live_server.metric("vllm:generation_tokens_total") - made < TOKENS * sequences / 2
    assert patient.get(f"{live_server.url}/load").json()["server_load"] == 0


def test_what_still_waits_is_dropped_too(live_server: RunningServer) -> None:
    """More than the pool holds at once: some run, some wait, all of their clients leave."""
    before = aborts(live_server)
    with contextlib.ExitStack() as clients:
        for number in range(10):
            body = {"prompt": f"{number} " * 300, "max_tokens": 300, **GREEDY}
            clients.enter_context(asked(live_server, "/v1/completions", body))
        live_server.wait_until(lambda: live_server.metric("vllm:num_requests_waiting") > 0)
        live_server.wait_until(lambda: patient.get(f"{live_server.url}/load").json()["server_load"] == 10)
    live_server.wait_until_idle()
    assert aborts(live_server) - before == 10


def test_the_others_do_not_notice(live_server: RunningServer) -> None:
    mine = {"prompt": "Water boils at", "max_tokens": 120, **GREEDY}
    alone = answered(ask(live_server, **mine))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, live_server, **mine)
        for _ in range(5):
            with asked(live_server, "/v1/completions", {"prompt": ["x", "y"], "max_tokens": TOKENS, **GREEDY}):
                live_server.wait_until(lambda: live_server.metric("vllm:num_requests_running") >= 2)
        assert answered(beside.result())["choices"] == alone["choices"]
