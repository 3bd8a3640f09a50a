"""A20: ids that clients choose may repeat, overlap and come back: they are echoed, and name what can be aborted."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import patient
from tests.cases.asking import answered
from tests.server.running_server import RunningServer

ROUNDS = 200
LONG = {"prompt": "One, two,", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}


def ask_as(server: RunningServer, name: str, **fields: Any) -> httpx.Response:
    """A completion whose id is ``name``, in the body and in the header."""
    body = {**fields, "request_id": name}
    return patient.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": name})


def test_two_at_once_under_one_id_both_complete(live_server: RunningServer) -> None:
    lengths = [2, 20, 5, 30]
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda n: ask_as(live_server, "twin", **{**SHORT, "max_tokens": n}), lengths))
    for length, answer in zip(lengths, answers):
        body = answered(answer)
        assert (body["id"], answer.headers["x-request-id"]) == ("cmpl-twin", "twin")
        assert body["usage"]["completion_tokens"] == length
        alone = answered(ask_as(live_server, "other", **{**SHORT, "max_tokens": length}))
        assert body["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.timeout(600)
def test_an_id_that_was_aborted_can_be_used_at_once(live_server: RunningServer) -> None:
    """A late abort of the old one must never reach the new one."""
    expected = answered(ask_as(live_server, "again", **SHORT))["choices"][0]["text"]
    with patient.Client(base_url=live_server.url) as client:
        for _ in range(ROUNDS):
            body = {**LONG, "stream": True, "request_id": "again"}
            with client.stream("POST", "/v1/completions", json=body) as old:
                lines = (line for line in old.iter_lines() if line.startswith("data: {"))
                next(lines)
                assert patient.delete(f"{live_server.url}/v1/requests/again").json()["aborted"] == 1
                new = answered(ask_as(live_server, "again", **SHORT))
                assert new["choices"][0]["text"] == expected
                assert new["choices"][0]["finish_reason"] == "length"
                *_, last = lines
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_an_id_whose_client_left_can_be_used_at_once(live_server: RunningServer) -> None:
    expected = answered(ask_as(live_server, "left", **SHORT))["choices"][0]["text"]
    for _ in range(20):
        body = {**LONG, "stream": True, "request_id": "left"}
        with patient.stream("POST", f"{live_server.url}/v1/completions", json=body) as old:
            next(old.iter_lines())
        assert answered(ask_as(live_server, "left", **SHORT))["choices"][0]["text"] == expected


def test_an_id_that_nothing_runs_under_is_404(live_server: RunningServer) -> None:
    answered(ask_as(live_server, "done", **SHORT))
    for name in ("done", "cmpl-done", "never", "%00", "a/b"):
        gone = patient.delete(f"{live_server.url}/v1/requests/{name}")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "request_id")
