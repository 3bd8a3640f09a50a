"""How cases speak HTTP: one call, and one check of a refusal."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests import patient
from tests.server.running_server import RunningServer


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """POST ``fields`` as JSON."""
    return patient.post(f"{server.url}{path}", json=fields)


def ask_raw(server: RunningServer, body: str, path: str = "/v1/completions") -> httpx.Response:
    """POST a body as it is written, valid JSON or not."""
    return patient.post(f"{server.url}{path}", content=body, headers={"content-type": "application/json"})


def answered(response: httpx.Response) -> Any:
    """The body of a 200."""
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, param: str, *words: str) -> str:
    """The message of a 400 that names ``param`` and holds each of ``words``."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert all(word in error["message"] for word in words), error
    return str(error["message"])


def events(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """The events of a stream, each decoded; the last one was [DONE]."""
    with patient.stream("POST", f"{server.url}{path}", json={**fields, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a completions stream."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)
