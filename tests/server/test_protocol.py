"""The shapes of answers, chunks and errors, over an engine without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pydantic
import pytest

from octavo.config import ServerConfig
from octavo.entrypoints.api.completions import CompletionRequest
from octavo.entrypoints.api.responses.requests import ResponsesRequest
from octavo.entrypoints.api.shared.shapes import ChatRequest
from octavo.entrypoints.api.tokenize import DetokenizeRequest
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.messages import RepetitionDetectionParams
from tests.server.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(ServerState([ServedModel("m", engine=engine)])) as client:  # type: ignore[arg-type]
        yield client


def client_of(state: ServerState) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://octavo")


def events(response: httpx.Response) -> list[Any]:
    """The decoded events of a stream; the last one must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts]


async def test_chat_answer(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "model": "m", "request_id": "mine"})
    body = response.json()
    assert response.status_code == 200
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-mine", "chat.completion", "m")
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "abc"
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    prompt = len("user:hi\nassistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_chat_chunks_are_openais(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 2}))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert "".join(c["delta"].get("content", "") for c in mine) == "abc"
        assert [c["finish_reason"] for c in mine] == [None] * 4 + ["length"]
        assert mine[-1]["delta"] == {}


async def test_the_usage_chunk_comes_only_on_request(client: httpx.AsyncClient) -> None:
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await client.post("/v1/chat/completions", json=asked))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)
    asked["stream_options"]["continuous_usage_stats"] = True  # type: ignore[index]
    chunks = events(await client.post("/v1/chat/completions", json=asked))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 1, 2, 3, 3, 3]


async def test_chat_logprobs_are_finite_and_ranked(client: httpx.AsyncClient) -> None:
    body = (await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c"]
    assert content[0]["logprob"] == -9999.0
    assert content[0]["bytes"] == [97]
    assert [(t["token"], t["logprob"]) for t in content[0]["top_logprobs"]] == [("b", -0.5), ("a", -9999.0)]
    streamed = events(
        await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2, "stream": True})
    )
    told = [e for c in streamed if (p := c["choices"][0]["logprobs"]) for e in p["content"]]
    assert told == content


async def test_completions_number_choices_prompt_major(client: httpx.AsyncClient) -> None:
    asked = {"prompt": ["x", "y"], "n": 2, "max_tokens": 2, "echo": True}
    body = (await client.post("/v1/completions", json=asked)).json()
    assert body["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "\x01xab"),
        (1, "\x01xab"),
        (2, "\x01yab"),
        (3, "\x01yab"),
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 8)
    chunks = events(await client.post("/v1/completions", json={**asked, "stream": True}))
    for choice in body["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine].count(None) == len(mine) - 1
        assert mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_with_echo(client: httpx.AsyncClient, stream: bool) -> None:
    asked = {"prompt": [1, 120], "max_tokens": 2, "echo": True, "logprobs": 1, "stream": stream}
    response = await client.post("/v1/completions", json=asked)
    if stream:
        parts = [p for c in events(response) if (p := c["choices"][0]["logprobs"])]
        logprobs = {name: [v for part in parts for v in part[name]] for name in parts[0]}
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["\x01", "x", "a", "b"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -9999.0, -9999.0, -9999.0]
    assert logprobs["top_logprobs"] == [
        None,
        {"y": -0.5, "x": -9999.0},
        {"b": -0.5, "a": -9999.0},
        {"c": -0.5, "b": -9999.0},
    ]


async def test_zero_tokens_with_echo_scores_the_prompt(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "xy", "max_tokens": 0, "echo": True, "logprobs": 0}
    body = (await client.post("/v1/completions", json=asked)).json()
    assert body["choices"][0]["text"] == "\x01xy"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -9999.0, -9999.0]
    assert body["usage"]["completion_tokens"] == 0


async def test_return_token_ids(client: httpx.AsyncClient) -> None:
    body = (await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
    assert body["choices"][0]["token_ids"] == [97, 98, 99]
    same = await client.post("/tokenize", json={"messages": CHAT["messages"]})
    assert same.json()["tokens"] == body["prompt_token_ids"]


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ("chat", {"tools": [{"type": "function"}]}, "tools"),
    ("chat", {"guided_json": {}}, "guided_json"),
    ("chat", {"response_format": {"type": "yaml"}}, "response_format"),
    ("chat", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("chat", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ("chat", {"top_logprobs": 3}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_completion_tokens": 60}, "max_completion_tokens"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"bad_words": [""]}, "bad_words"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": ["x"] * 100, "n": 100}, "prompt"),
    ("completions", {"prompt": [[5], []]}, "prompt"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": [1.5]}, "prompt"),
    ("completions", {"prompt": ["a", 1]}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [[1], "a"]}, "prompt"),
    ("completions", {"prompt": [True]}, "prompt"),
    ("completions", {"prompt": {}}, "prompt"),
    ("completions", {"prompt": ["x"] * 1025}, "prompt"),
    ("completions", {"prompt": "x" * 100_000}, "prompt"),
    ("completions", {"prompt": ["x", "x" * 100_000]}, "prompt"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": -1}, "max_tokens"),
    ("completions", {"max_tokens": 2**62}, "max_tokens"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": 10**9}, "n"),
    ("completions", {"top_k": 0.01}, "top_k"),
    ("completions", {"stop": ""}, "stop"),
    ("completions", {"stop": [f"s{i}" for i in range(129)]}, "stop"),
    ("completions", {"logit_bias": {"999999": 5}}, "logit_bias"),
    ("completions", {"logit_bias": {"-1": 5}}, "logit_bias"),
    ("completions", {"logit_bias": {"abc": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": "1"}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": True}}, "logit_bias"),
    ("completions", {"logit_bias": [1]}, "logit_bias"),
    ("completions", {"repetition_penalty": 1e-300}, "repetition_penalty"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"logprobs": -1}, "logprobs"),
    ("completions", {"logprobs": -2}, "logprobs"),
    ("completions", {"logprobs": 1, "logprob_token_ids": [1, 2]}, "logprobs"),
    ("completions", {"logprob_token_ids": [10**9]}, "logprob_token_ids"),
    ("completions", {"prompt_logprob_token_ids": [1, 1]}, "prompt_logprob_token_ids"),
    ("completions", {"prompt_logprob_start": -1}, "prompt_logprob_start"),
    ("completions", {"bad_words": ["x"] * 100_000}, "bad_words"),
    ("completions", {"bad_words": ["x"] * 300}, "bad_words"),
    ("completions", {"allowed_token_ids": [0] * 300_000}, "allowed_token_ids"),
    ("completions", {"length_penalty": "long"}, "length_penalty"),
    ("completions", {"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
    ("completions", {"repetition_detection": {"max_pattern_size": 1.5, "min_count": 2}}, "repetition_detection"),
    ("completions", {"thinking_token_budget": -5}, "thinking_token_budget"),
    ("completions", {"stream_interval": 0}, "stream_interval"),
    ("completions", {"truncation_side": "middle"}, "truncation_side"),
    ("completions", {"cache_salt": "x" * 1025}, "cache_salt"),
    ("completions", {"prompt": ["a", "b"], "n": 10**9}, "n"),
    ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat", {"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"logprob_token_ids": [2]}, "logprob_token_ids"),
    ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ("completions", {"cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "fields", "param"), BAD_FIELDS)
async def test_a_bad_field_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    path, base = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        "completions": ("/v1/completions", {"prompt": "hi"}),
    }[route]
    if stream and param == "stream_options":
        return
    response = await client.post(path, json={**base, **fields, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "BadRequestError", 400)
    assert param in error["message"] or "context length" in error["message"] or "content parts" in error["message"]
    assert engine.running == 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
)
async def test_numbers_that_are_none(client: httpx.AsyncClient, engine: FakeEngine, name: str, value: str) -> None:
    written = f'{{"5": {value}}}' if name == "logit_bias" else value
    response = await client.post(
        "/v1/completions",
        content=f'{{"prompt": "x", "{name}": {written}}}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert engine.seen == []


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'"text"', b"null", b"9" * 9999],
)
async def test_bodies_that_are_no_request(client: httpx.AsyncClient, content: bytes) -> None:
    for headers in ({"content-type": "application/json"}, {}):
        response = await client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a", 1] * 100_000}),
        ("/v1/completions", {"prompt": [[1, "a"]] * 100_000}),
        ("/v1/completions", {"prompt": "x", "stop": [1] * 200_000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): "x" for i in range(100_000)}}),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": ["a"] * 200_000}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 300_000}),
        ("/v1/chat/completions", {"messages": [1] * 200_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 200_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("/detokenize", {"tokens": ["a"] * 200_000}),
        ("/v1/responses", {"input": "x", "metadata": {str(i): i for i in range(100_000)}}),
    ],
)
def test_a_body_with_many_faults_is_refused_at_the_first(path: str, fields: dict[str, Any]) -> None:
    models = {"/detokenize": DetokenizeRequest, "/v1/completions": CompletionRequest, "/v1/responses": ResponsesRequest}
    model = models.get(path, ChatRequest)
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() <= 2


async def test_the_content_type_must_be_json(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = await client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert response.status_code == 400
        assert "Content-Type: application/json" in response.json()["error"]["message"]


async def test_an_unknown_model_and_path_are_404(client: httpx.AsyncClient) -> None:
    answers = [
        await client.post("/v1/chat/completions", json={**CHAT, "model": "other"}),
        await client.get("/v1/models/other"),
        await client.get("/v1/nothing"),
    ]
    assert [(a.status_code, a.json()["error"]["type"]) for a in answers] == [(404, "NotFoundError")] * 3
    assert answers[0].json()["error"]["param"] == "model"
    assert (await client.get("/v1/completions")).json()["error"]["code"] == 405


async def test_unknown_fields_are_ignored(client: httpx.AsyncClient) -> None:
    extra = {
        "user": "u",
        "metadata": {"a": "b"},
        "never_heard_of": [1],
        "tools": [],
        "response_format": {"type": "text"},
    }
    response = await client.post("/v1/chat/completions", json={**CHAT, **extra})
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "never_heard_of"  # the others are known to have no effect


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_named_in_a_header(client: httpx.AsyncClient, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "stream": stream}
    assert "x-octavo-ignored-fields" not in (await client.post("/v1/completions", json=body)).headers
    body |= {"nasty\r\nname: é": 1, "x" * 999: 2, "ok": 3}
    if stream:
        body["stream_options"] = {"include_usage": True, "colour": "red"}
    shown = (await client.post("/v1/completions", json=body)).headers["x-octavo-ignored-fields"]
    expected = ["nasty%0D%0Aname%3A%20%C3%A9", "ok", *(["stream_options.colour"] if stream else []), "x" * 64]
    assert shown == ", ".join(expected)
    many = {"prompt": "x", **{f"f{i:03}": 0 for i in range(500)}}
    shown = (await client.post("/v1/completions", json=many)).headers["x-octavo-ignored-fields"]
    assert shown.endswith("f019, and 480 more")


async def test_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "bad_words": ["no"],
        "logprob_token_ids": [5, 6],
        "prompt_logprob_token_ids": [7],
        "prompt_logprob_start": 2,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        "spaces_between_special_tokens": False,
        "skip_reading_prefix_cache": True,
        "stream_interval": 3,
        "logit_bias": {"9": 1e9},
        "stop": ["a", "b"],
    }
    await client.post("/v1/completions", json={"prompt": "x", "vllm_xargs": {"a": 1}, **fields})
    await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, **fields})
    for params in engine.seen:
        assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=4, min_count=3)
        assert params.logit_bias == {9: 100.0}
        names = fields.keys() - {"repetition_detection", "logit_bias"}
        assert {name: getattr(params, name) for name in names} == {name: fields[name] for name in names}
    assert len(engine.seen) == 2


async def test_a_refusal_says_what_to_do_instead(client: httpx.AsyncClient) -> None:
    for field, value, words in (
        ("suffix", "end", "fill-in-the-middle"),
        ("best_of", 3, "n samples"),
    ):
        error = (await client.post("/v1/completions", json={"prompt": "x", field: value})).json()["error"]
        assert error["param"] == field
        assert words in error["message"]


async def test_the_model_card_has_the_sampling_defaults(engine: FakeEngine) -> None:
    defaults = {"temperature": 0.25, "top_k": 9, "max_tokens": 2}
    async with client_of(ServerState([ServedModel("m", engine=engine, sampling_defaults=defaults)])) as client:  # type: ignore[arg-type]
        assert (await client.get("/v1/models")).json()["data"][0]["default_sampling_params"] == defaults
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/chat/completions", json={"messages": CHAT["messages"], "temperature": 1.5})
    first, second = engine.seen
    assert (first.temperature, first.top_k, first.max_tokens) == (0.25, 9, 2)
    assert (second.temperature, second.top_k, second.max_tokens) == (1.5, 9, 2)


async def test_a_long_conversation_is_rendered_like_a_short_one(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "x"}] * 40
    tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert tokens == [ord(c) for c in "user:x\n" * 40 + "assistant:"]


async def test_an_empty_prompt_is_bos_or_refused(client: httpx.AsyncClient) -> None:
    for prompt in ("", [""]):
        body = (await client.post("/v1/completions", json={"prompt": prompt})).json()
        assert body["usage"]["prompt_tokens"] == 1
    async with client_of(ServerState([ServedModel("m", engine=FakeEngine(bos=False))])) as without_bos:  # type: ignore[arg-type]
        for prompt in ("", [""], [[]]):
            response = await without_bos.post("/v1/completions", json={"prompt": prompt})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(("length", "max_tokens", "ok"), [(8, 57, False), (8, 56, True), (63, 1, True), (64, 1, False)])
async def test_the_context_limit_is_exact(client: httpx.AsyncClient, length: int, max_tokens: int, ok: bool) -> None:
    response = await client.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": max_tokens})
    assert response.status_code == (200 if ok else 400)
    if not ok:
        message = response.json()["error"]["message"]
        assert "64 tokens" in message
        assert str(length) in message


async def test_omitted_max_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for omitted in ({}, {"max_tokens": None}):
        await client.post("/v1/completions", json={"prompt": [5] * 8, **omitted})
        await client.post("/v1/completions", json={"prompt": [5] * 60, **omitted})
        await client.post("/v1/chat/completions", json={"messages": CHAT["messages"], **omitted})
    assert [p.max_tokens for p in engine.seen] == [16, 4, 64 - len("user:hi\nassistant:")] * 2


async def test_truncation_keeps_the_last_tokens(client: httpx.AsyncClient) -> None:
    prompt = list(range(40, 110))
    for keep, expected in ((10, prompt[-10:]), (-1, prompt[-48:])):
        asked = {"prompt": prompt, "truncate_prompt_tokens": keep, "return_token_ids": True, "max_tokens": 16}
        body = (await client.post("/v1/completions", json=asked)).json()
        assert body["choices"][0]["prompt_token_ids"] == expected


async def test_defaults_come_from_the_request_then_the_model_then_openai() -> None:
    engine = FakeEngine()
    state = ServerState([ServedModel("m", engine=engine, sampling_defaults={"temperature": 0.2, "top_k": 7})])  # type: ignore[arg-type]
    async with client_of(state) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post(
            "/v1/completions", json={"prompt": "x", "temperature": 0, "top_k": -1, "logit_bias": {"5": 1e9}}
        )
    first, second = engine.seen
    assert (first.temperature, first.top_k, first.top_p) == (0.2, 7, 1.0)
    assert (second.temperature, second.top_k, second.logit_bias) == (0.0, -1, {5: 100.0})


async def test_an_error_in_mid_stream_is_an_event(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 1
    chunks = events(await client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert chunks[-1]["error"]["message"] == "this one failed"
    assert chunks[-1]["error"]["code"] == 500
    engine.fail_after = 0
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 500
    assert engine.running == 0


async def test_one_failing_prompt_ends_the_whole_batch(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.delay = 0, 0.001
    response = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 9})
    assert response.status_code == 500
    assert engine.running == 0


async def test_an_unforeseen_exception_has_an_id_that_the_log_has(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.tokenizer.encode = None  # type: ignore[assignment, method-assign]
    response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    error_id = response.json()["error"]["message"].split()[-1]
    assert len(error_id) == 32
    assert error_id in caplog.text


async def test_health_tells_loading_from_ready_from_dead() -> None:
    state = ServerState([ServedModel("m", phase="load weights")])
    async with client_of(state) as client:
        response = await client.get("/health")
        assert (response.status_code, response.json()["phase"]) == (503, "load weights")
        early = await client.post("/v1/chat/completions", json=CHAT)
        assert (early.status_code, early.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert early.headers["retry-after"] == "1"
        assert (await client.get("/metrics")).status_code == 200
        engine = FakeEngine()
        state.default.engine = engine  # type: ignore[assignment]
        assert [(await client.request(m, p)).status_code for m, p in (("GET", "/health"), ("POST", "/ping"))] == [
            200,
            200,
        ]
        assert b"num_requests_running" in (await client.get("/metrics")).content
        engine.dead = True
        assert (await client.get("/health")).status_code == 503
        state.default.failure = "no such model"
        assert (await client.get("/health")).json() == {"status": "dead", "message": "no such model"}


async def test_the_key_guards_every_route_but_the_open_ones(engine: FakeEngine) -> None:
    config = ServerConfig(api_key=("s3cret",), enable_docs_page=True)
    async with client_of(ServerState([ServedModel("m", engine=engine)], config=config)) as client:  # type: ignore[arg-type]
        for path in ("/v1/models", "/openapi.json", "/docs", "/version", "/metrics", "/nothing"):
            assert (await client.get(path)).status_code == 401
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert (await client.post(path, json={})).json()["error"]["type"] == "AuthenticationError"
        for path in ("/health", "/ping"):
            assert (await client.get(path)).status_code == 200
        for header, status in (
            ("Bearer s3cret", 200),
            ("bearer  s3cret", 200),
            ("Basic s3cret", 401),
            ("Bearer s3cre", 401),
            ("s3cret", 401),
            ("Bearer \xe9", 401),
        ):
            answer = await client.get("/v1/models", headers={b"authorization": header.encode("latin-1")})
            assert answer.status_code == status


async def test_a_body_over_the_limit_is_413(engine: FakeEngine) -> None:
    config = ServerConfig(max_body_bytes=1024)
    async with client_of(ServerState([ServedModel("m", engine=engine)], config=config)) as client:  # type: ignore[arg-type]

        async def trickle() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        for content in (b" " * 1025, trickle()):
            response = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_tokenize_and_detokenize(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})).json()
    assert body == {"count": 3, "max_model_len": 64, "tokens": [1, 104, 105], "token_strs": ["\x01", "h", "i"]}
    plain = (await client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})).json()
    assert plain["tokens"] == [104, 105]
    assert (await client.post("/detokenize", json={"tokens": [1, 104]})).json() == {"prompt": "\x01h"}
    for bad in ({}, {"prompt": "x", "messages": []}):
        assert (await client.post("/tokenize", json=bad)).status_code == 400
    assert (await client.post("/detokenize", json={"tokens": [128]})).json()["error"]["param"] == "tokens"


async def test_a_client_that_leaves_ends_the_work() -> None:
    engine = FakeEngine(delay=0.01, max_model_len=10_000)
    app = build_app(ServerState([ServedModel("m", engine=engine)]))  # type: ignore[arg-type]
    for fields in ({"stream": True}, {}, {"n": 4}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "stream": True}):
        body = json.dumps({"prompt": "x", "max_tokens": 5000, **fields}).encode()
        gone = asyncio.Event()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive(inbox: list[Any] = inbox, gone: asyncio.Event = gone) -> Any:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        task = asyncio.create_task(app(scope, receive, send))
        while engine.running == 0:
            await asyncio.sleep(0.001)
        gone.set()
        await asyncio.wait_for(task, 5)
        assert engine.running == 0
    assert engine.aborted == 8
