"""The server for real: a process, the default model, the official client."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MAX_MODEL_LEN
from tests.server.running_server import RunningServer

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields, timeout=120)


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


@pytest.mark.parametrize("bias", [{"999999": 5}, {"-1": 5}, {"abc": 1}])
def test_a02_logit_bias_outside_the_vocabulary(server: RunningServer, bias: dict[str, float]) -> None:
    message = refused(ask(server, prompt="x", logit_bias=bias), "logit_bias")
    assert next(iter(bias)) in message


def test_a02_a_huge_bias_is_clamped(server: RunningServer) -> None:
    tokens = ask(server, "/tokenize", prompt=" yes", add_special_tokens=False).json()["tokens"]
    body = ask(server, prompt="x", max_tokens=3, logit_bias={str(tokens[0]): 1e9}, temperature=0).json()
    assert body["choices"][0]["text"] == " yes" * 3


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_a03_numbers_that_are_none(server: RunningServer, name: str, value: str) -> None:
    headers = {"content-type": "application/json"}
    body = f'{{"prompt": "x", "{name}": {value}}}'
    refused(httpx.post(f"{server.url}/v1/completions", content=body, headers=headers), name)


def test_a04_top_k_beyond_the_vocabulary_and_a_mixed_batch(server: RunningServer) -> None:
    assert ask(server, prompt="x", top_k=9_999_999, temperature=1, max_tokens=4).status_code == 200
    refused(ask(server, prompt="x", top_k=0.01), "top_k")
    refused(ask(server, prompt="x", top_k=-2), "top_k")
    greedy: dict[str, Any] = {"prompt": "Rivers run to", "temperature": 0, "max_tokens": 24}
    alone = ask(server, **greedy).json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, server, prompt="Mountains", temperature=1, top_k=5, max_tokens=32) for _ in range(4)]
        mixed = [pool.submit(ask, server, **greedy) for _ in range(4)]
        assert {f.result().json()["choices"][0]["text"] for f in mixed} == {alone}
        assert all(f.result().status_code == 200 for f in others)


def test_a08_logprobs_are_finite(server: RunningServer) -> None:
    body = ask(server, prompt="The sky is", echo=True, logprobs=1, temperature=1, top_k=1, max_tokens=4).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(math.isfinite(v) and v <= 0 for v in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == body["choices"][0]["text"]
    chat = ask(
        server,
        "/v1/chat/completions",
        messages=FRANCE,
        logprobs=True,
        top_logprobs=5,
        allowed_token_ids=[5],
        max_tokens=2,
    ).json()
    for entry in chat["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 5
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_a10_tokenize_of_messages_is_what_chat_computes(server: RunningServer) -> None:
    asked: dict[str, Any] = {"messages": FRANCE, "return_token_ids": True, "max_tokens": 1}
    chat = ask(server, "/v1/chat/completions", **asked).json()
    assert ask(server, "/tokenize", messages=FRANCE).json()["tokens"] == chat["prompt_token_ids"]


def test_a19_n_children_have_their_own_streams(server: RunningServer) -> None:
    asked: dict[str, Any] = {"prompt": "Colours:", "n": 3, "temperature": 1, "seed": 7, "max_tokens": 12}
    first, second = ask(server, **asked).json(), ask(server, **asked).json()
    texts = [c["text"] for c in first["choices"]]
    assert texts == [c["text"] for c in second["choices"]]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] > first["usage"]["prompt_tokens"]


def test_a20_equal_ids_of_clients_do_not_meet(server: RunningServer) -> None:
    asked: dict[str, Any] = {"prompt": "One", "request_id": "id", "max_tokens": 16, "temperature": 0}
    with ThreadPoolExecutor(4) as pool:
        answers = [f.result().json() for f in [pool.submit(ask, server, **asked) for _ in range(4)]]
    assert {a["id"] for a in answers} == {"cmpl-id"}
    assert len({a["choices"][0]["text"] for a in answers}) == 1


def test_a21_prompts_and_counts_out_of_range(server: RunningServer) -> None:
    for prompt in ([], [[]], [-1], [2**40], [49152]):
        refused(ask(server, prompt=prompt), "prompt")
    refused(ask(server, "/v1/chat/completions", messages=[]), "messages")
    for wrong in (0, -1, 2**62):
        refused(ask(server, prompt="x", max_tokens=wrong), "max_tokens")
    for wrong in (0, 10**9):
        refused(ask(server, prompt="x", n=wrong), "n")
    assert ask(server, prompt="x", max_tokens=None, ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    assert ask(server, prompt="", max_tokens=1).json()["usage"]["prompt_tokens"] == 1
    scored = ask(server, prompt="The end", max_tokens=0, echo=True, logprobs=0).json()
    assert scored["choices"][0]["text"].endswith("The end")
    assert scored["usage"]["completion_tokens"] == 0


def test_a22_the_context_limit_is_exact(server: RunningServer) -> None:
    limit = server.client().models.list().data[0].max_model_len  # type: ignore[attr-defined]
    assert limit == MAX_MODEL_LEN
    prompt = [100] * (limit - 8)
    message = refused(ask(server, prompt=prompt, max_tokens=9), "max_tokens")
    assert all(str(number) in message for number in (limit, limit - 8, 9))
    fits = ask(server, prompt=prompt, max_tokens=8, ignore_eos=True).json()
    assert fits["usage"]["total_tokens"] == limit
    refused(ask(server, prompt=[100] * limit, max_tokens=1), "prompt")
    assert ask(server, prompt=[100] * (limit - 1), max_tokens=1).status_code == 200
    chat = ask(server, "/v1/chat/completions", messages=FRANCE, ignore_eos=True).json()
    assert chat["usage"]["total_tokens"] == limit
    assert chat["choices"][0]["finish_reason"] == "length"
    kept = ask(server, prompt=prompt, truncate_prompt_tokens=10, max_tokens=1).json()
    assert kept["usage"]["prompt_tokens"] == 10


def test_stop_strings_streamed_and_not(server: RunningServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "smollm2", "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 32}
    free = client.completions.create(**asked).choices[0].text
    stop = free[7:10]
    whole = client.completions.create(**asked, stop=[stop]).choices[0]
    assert whole.text == free[: free.index(stop)]
    assert whole.finish_reason == "stop"
    chunks = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.text


def test_an_unknown_model_is_404(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(model="gpt-9", messages=FRANCE)  # type: ignore[arg-type]
    assert caught.value.param == "model"


def test_the_small_routes(server: RunningServer) -> None:
    text = "Grüße, 世界 \U0001f642"
    tokens = ask(server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert ask(server, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    assert httpx.get(f"{server.url}/version").json()["version"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.client().models.retrieve("smollm2").id == "smollm2"
    assert httpx.get(f"{server.url}/openapi.json").status_code == 200


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
        httpx.Client() as client,
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
