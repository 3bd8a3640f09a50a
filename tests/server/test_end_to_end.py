"""The server for real: a process, the default model, the official client."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests import patient
from tests.server.running_server import RunningServer, running_server

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return patient.post(f"{server.url}{path}", json=fields)


def refused(response: httpx.Response, param: str) -> str:
    """The message of a 400 that names ``param``."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    return str(error["message"])


def test_paris_streamed_and_not(server: RunningServer) -> None:
    client = server.client()
    whole = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=20)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    stream = client.chat.completions.create(
        model="smollm2",
        messages=FRANCE,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_streamed_and_not(server: RunningServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {
        "model": "smollm2",
        "prompt": ["Once upon a time", "1, 2, 3,"],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.completions.create(**asked, n=2)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text != whole.choices[2].text
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[0], texts[1]] == [whole.choices[0].text, whole.choices[2].text]


def test_a20_equal_ids_of_clients_do_not_meet(server: RunningServer) -> None:
    asked: dict[str, Any] = {"prompt": "One", "request_id": "id", "max_tokens": 16, "temperature": 0}
    with ThreadPoolExecutor(4) as pool:
        answers = [f.result().json() for f in [pool.submit(ask, server, **asked) for _ in range(4)]]
    assert {a["id"] for a in answers} == {"cmpl-id"}
    assert len({a["choices"][0]["text"] for a in answers}) == 1


def test_an_unknown_model_is_404(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(model="gpt-9", messages=FRANCE)  # type: ignore[arg-type]
    assert caught.value.param == "model"


def test_the_small_routes(server: RunningServer) -> None:
    text = "Grüße, 世界 \U0001f642"
    tokens = ask(server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert ask(server, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    assert patient.get(f"{server.url}/version").json()["version"]
    assert patient.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.client().models.retrieve("smollm2").id == "smollm2"
    assert patient.get(f"{server.url}/openapi.json").status_code == 200


LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 480, "temperature": 0}
LEAVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", {**LONG, "prompt": "Once"}),
    "stream": ("/v1/completions", {**LONG, "prompt": "Once", "stream": True}),
    "n": ("/v1/completions", {**LONG, "prompt": "Once", "n": 4, "temperature": 1}),
    "batch": ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]}),
    "chat": ("/v1/chat/completions", {**LONG, "messages": FRANCE, "max_tokens": 400, "stream": True}),
    "waiting": ("/v1/completions", {**LONG, "prompt": ["w"] * 80, "max_tokens": 400}),
}


@pytest.mark.parametrize("kind", LEAVERS)
def test_a24_a_client_that_leaves_ends_its_work(server: RunningServer, kind: str) -> None:
    path, fields = LEAVERS[kind]
    expected = fields.get("n", 1) * (len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1)
    finished = server.metric("vllm:generation_tokens_total")
    with (
        patient.Client() as client,
        client.stream("POST", f"{server.url}{path}", json=fields)
        if fields.get("stream")
        else _half_request(server, path, fields),
    ):
        server.wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
    server.wait_until_idle()
    assert server.metric("vllm:generation_tokens_total") - finished < expected * fields["max_tokens"]


class _half_request:  # noqa: N801  a context manager
    """A request whose socket is closed before the answer."""

    def __init__(self, server: RunningServer, path: str, fields: dict[str, Any]) -> None:
        import socket

        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(fields).encode()
        headers = {"Host": host, "Content-Type": "application/json", "Content-Length": len(body)}
        head = "".join([f"POST {path} HTTP/1.1\r\n", *(f"{k}: {v}\r\n" for k, v in headers.items()), "\r\n"])
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(head.encode() + body)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_64_streams_of_mixed_lengths_and_half_of_them_leave(server: RunningServer) -> None:
    client = server.client()
    barrier = threading.Barrier(64)

    def one(number: int) -> int:
        barrier.wait()
        stream = client.completions.create(
            model="smollm2",
            prompt="word " * (1 + number * 5 % 97),
            max_tokens=4 + number * 7 % 40,
            temperature=number % 3 / 2,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        for seen, chunk in enumerate(stream):
            if chunk.usage is not None:
                return chunk.usage.completion_tokens
            if number % 2 and seen == 2:
                stream.close()
                return -1
        raise AssertionError("the stream ended without its usage")

    with ThreadPoolExecutor(64) as pool:
        counts = list(pool.map(one, range(64)))
    assert counts == [-1 if number % 2 else 4 + number * 7 % 40 for number in range(64)]
    server.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_in_larger_pieces(server: RunningServer, path: str) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 33, "ignore_eos": True, "return_token_ids": True}
    asked |= {"messages": FRANCE} if path.startswith("/v1/chat") else {"prompt": "1, 2, 3,"}
    ids = ask(server, path, **asked).json()["choices"][0]["token_ids"]
    with patient.stream(
        "POST", f"{server.url}{path}", json={**asked, "stream": True, "stream_interval": 10}
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [choice["token_ids"] for event in events for choice in event["choices"] if choice.get("token_ids")]
    assert [len(piece) for piece in pieces] == [1, 10, 10, 10, 2]
    assert [token for piece in pieces for token in piece] == ids


def test_flags_of_sampling(smollm2_path: str) -> None:
    flags = ["--max-model-len", "256", "--kv-cache-memory", "16MiB", "--served-model-name", "smollm2", "--strict"]
    flags += ["--override-generation-config", '{"temperature": 0, "max_new_tokens": 3}', "--max-logprobs", "-1"]
    flags += ["--logprobs-mode", "processed_logits", "--max-n", "2", "--max-bad-words", "1", "--stream-interval", "4"]
    with running_server(smollm2_path, *flags) as server:
        server.wait_until_ready()
        card = server.client().models.list().data[0]
        assert card.default_sampling_params == {"temperature": 0, "max_tokens": 3}  # type: ignore[attr-defined]
        body = ask(server, prompt="1, 2, 3,", logprobs=-1).json()
        assert body["usage"]["completion_tokens"] == 3
        table = body["choices"][0]["logprobs"]["top_logprobs"][0]
        assert len(table) > 40_000
        assert max(table.values()) > 0  # they are logits
        assert "2" in refused(ask(server, prompt="x", n=3), "n")
        assert "1 word" in refused(ask(server, prompt="x", bad_words=["a", "b"]), "bad_words")
        refused(ask(server, prompt="x", colour="red"), "colour")
