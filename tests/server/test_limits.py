"""Every list and count that a client chooses has a bound, and a refusal names the field, what came and the limit."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import threading
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel

from octavo.config import ServerConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.http.field_errors import describe_fields, shown
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.server.fake_engine import FakeEngine, FakeTokenizer

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
}
TEXT, CHAT, MESSAGES, RESPONSES = list(BODIES)[:4]


def client_of(config: ServerConfig | None = None, engine: FakeEngine | None = None) -> httpx.AsyncClient:
    state = ServerState([ServedModel("m", engine=engine or FakeEngine())], config=config or ServerConfig())  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(state)), base_url="http://octavo")


# (path, field, value, what the message must have)
REFUSALS: list[tuple[str, str, Any, tuple[str, ...]]] = [
    *[(path, "temperature", value, (str(float(value)), "[0, 2]")) for path in (TEXT, CHAT) for value in (-1, 3)],
    *[(TEXT, "top_p", value, (str(value), "(0, 1]")) for value in (-0.5, 0.0, 1.5)],
    (TEXT, "top_k", -2, ("-2", "-1 or 0")),
    (TEXT, "top_k", 0.5, ("0.5", "integer")),
    (TEXT, "min_p", 1.5, ("1.5", "[0, 1]")),
    (TEXT, "presence_penalty", 2.5, ("2.5", "[-2, 2]")),
    (TEXT, "frequency_penalty", -2.5, ("-2.5", "[-2, 2]")),
    (TEXT, "repetition_penalty", -1, ("-1", "1e6")),
    (TEXT, "n", 0, ("0", "at least 1")),
    (TEXT, "n", 129, ("129", "128", "--max-n")),
    (CHAT, "n", 10**9, ("1000000000", "128")),
    (TEXT, "max_tokens", -1, ("-1", "at least 1")),
    (TEXT, "max_tokens", 63, ("63", "64", "2 in the prompt")),
    (TEXT, "min_tokens", 17, ("17", "16")),
    (TEXT, "seed", 2**64, (str(2**64), "64-bit")),
    (TEXT, "stop", ["a"] * 129, ("129", "128")),
    (TEXT, "stop", "a" * 4097, ("4097", "4096")),
    (CHAT, "stop", ["b", "a" * 4097], ("stop[1]", "4097", "4096")),
    (TEXT, "stop", ["a", 5], ("stop[1]", "5", "string")),
    (TEXT, "stop_token_ids", [128], ("128", "127")),
    (TEXT, "stop_token_ids", [1] * 4097, ("4097", "4096")),
    (TEXT, "allowed_token_ids", [-1], ("-1", "token ids")),
    (TEXT, "allowed_token_ids", [1] * 262145, ("262145", "262144")),
    (TEXT, "logit_bias", {"128": 1}, ("128", "127")),
    (TEXT, "logit_bias", {"5": "much"}, ("'5'", '"much"', "number")),
    (TEXT, "bad_words", ["x"] * 257, ("257", "256")),
    (TEXT, "bad_words", ["x" * 1025], ("bad_words[0]", "1025", "1024")),
    (TEXT, "logprobs", 21, ("21", "20", "--max-logprobs")),
    (TEXT, "vllm_xargs", {"a": 2**70}, ("message can carry",)),
    (CHAT, "vllm_xargs", {"a": 2**70}, ("message can carry",)),
    (CHAT, "structured_outputs", {"choice": ["a" * 2**20, "b"]}, ("structured_outputs.choice", "1048577", "1048576")),
    (CHAT, "structured_outputs", {"regex": "a" * (2**20 + 1)}, ("structured_outputs.regex", "1048577", "1048576")),
    (TEXT, "prompt_logprobs", -2, ("-2", "-1")),
    (TEXT, "truncate_prompt_tokens", -2, ("-2", "-1")),
    (TEXT, "request_id", "r" * 257, ("257", "256")),
    (TEXT, "cache_salt", "s" * 1025, ("1025", "1024")),
    (TEXT, "stream_interval", 0, ("0", "at least 1")),
    (TEXT, "prompt", ["x"] * 1025, ("1025", "1024")),
    (TEXT, "prompt", [[1]] * 1025, ("1025", "1024")),
    (TEXT, "prompt", [1] * 65, ("65", "64")),
    (TEXT, "prompt", {"a": 1}, ("an object", "a text")),
    (CHAT, "messages", [USER] * 16385, ("16385", "16384")),
    (CHAT, "messages", [{**USER, "content": [{"type": "text", "text": "x"}] * 1025}], ("[0].content", "1025", "1024")),
    (CHAT, "messages", [USER, {"role": "boss", "content": "x"}], ("messages[1].role", "boss", "assistant")),
    (CHAT, "messages", [{"content": "x"}], ("messages[0].role", "required")),
    (CHAT, "tools", [TOOL] * 1025, ("1025", "1024")),
    (CHAT, "tools", [{**TOOL, "function": {"name": "a b"}}], ("tools[0].function.name", "a b", "{1,64}")),
    (CHAT, "tool_choice", "x", ('"x"', "'required'")),
    (CHAT, "documents", [{}] * 1025, ("1025", "1024")),
    (MESSAGES, "stop_sequences", ["a"] * 129, ("129", "128")),
    (MESSAGES, "messages", [{"role": "boss", "content": "x"}], ("messages[0].role", "boss", "assistant")),
    (MESSAGES, "temperature", 3, ("3", "at most 1")),
    (RESPONSES, "temperature", -1, ("-1", "[0, 2]")),
    (RESPONSES, "input", 5, ("5", "string or an array")),
    ("/tokenize", "prompt", 5, ("5", "string")),
]


@pytest.mark.parametrize(("path", "field", "value", "words"), REFUSALS)
async def test_a_refusal_names_field_value_and_limit(path: str, field: str, value: Any, words: tuple[str, ...]) -> None:
    async with client_of() as client:
        response = await client.post(path, json={**BODIES[path], field: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert [word for word in (field.split(".")[0], *words) if word not in error["message"]] == [], error["message"]
    assert len(error["message"]) < 400
    if path != MESSAGES:
        assert error["param"].partition(".")[0] == field


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("n", {"n": 64, "stop": ["x" * 4095 + chr(i) for i in range(128)]}),
        ("prompt", {"prompt": ["x"] * 64, "stop": ["x" * 4095 + chr(i) for i in range(128)]}),
        ("prompt", {"prompt": ["x"] * 1024, "allowed_token_ids": [99] * 5000}),
        ("prompt", {"prompt": ["x"] * 64, "bad_words": ["x" * 100 + chr(i + 200) for i in range(200)]}),
        ("logprobs", {"prompt": ["x"] * 1024, "logprobs": -1, "max_tokens": 60}),
        ("prompt_logprobs", {"prompt": ["x" * 60] * 1024, "prompt_logprobs": -1, "max_tokens": 1}),
    ],
)
async def test_what_is_multiplied_has_a_bound(field: str, more: dict[str, Any]) -> None:
    """Long lists for each of many sequences, and every log-probability of every token: gigabytes from a small body."""
    async with client_of() as client:
        refused = await client.post(TEXT, json={"prompt": "x", **more})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, field)
        assert "at most" in error["message"]
        few = {**more, "n": 1, "prompt": "x", "logprobs": None, "prompt_logprobs": None}
        assert (await client.post(TEXT, json=few)).status_code == 200


@pytest.mark.parametrize(("keys", "most"), [((), 32), (("k", "other"), 8)])
async def test_bodies_that_are_kept_have_a_bound_together(keys: tuple[str, ...], most: int) -> None:
    """What nobody reads of a body stays in memory while its answer is made."""
    engine, limit = FakeEngine(delay=0.02), 100_000
    large = json.dumps({"prompt": "x", "max_tokens": 30, "metadata": "y" * 90_000}).encode()
    async with client_of(ServerConfig(api_key=keys, max_body_bytes=limit), engine=engine) as client:

        async def ask(body: bytes, key: str = "k") -> httpx.Response:
            headers = {"content-type": "application/json", "x-api-key": key}
            return await client.post(TEXT, content=body, headers=headers)

        asked = [asyncio.create_task(ask(large)) for _ in range(most * limit // len(large) + 5)]
        while engine.running < most * limit // len(large):
            await asyncio.sleep(0.01)
        assert (await ask(b'{"prompt": "x", "max_tokens": 1}')).status_code == 200
        if keys:
            assert (await ask(large, "other")).status_code == 200
        answers = await asyncio.gather(*asked)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert [answer.status_code for answer in refused] == [429] * 5
        assert f"at most {most * limit} are kept" in refused[0].json()["error"]["message"]
        assert "retry-after" in refused[0].headers
        assert (await ask(large)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 1_048_577}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1_048_577}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 1_048_577}]}),
        (TEXT, {"prompt": "x" * 1_048_577, "truncate_prompt_tokens": 3}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1_048_577}], "truncate_prompt_tokens": 3}),
    ],
)
async def test_a_text_that_need_not_fit_is_bounded_all_the_same(path: str, body: dict[str, Any]) -> None:
    """The tokenizer needs hundreds of bytes a token."""
    async with client_of() as client:
        refused = await client.post(path, json=body)
        assert refused.status_code == 400
        assert "at most 1048576 are tokenised" in refused.json()["error"]["message"]
        assert (await client.post("/tokenize", json={"prompt": "x" * 1_048_576})).json()["count"] == 1_048_577


async def test_a_compressed_body_is_refused() -> None:
    """What would unpack to gigabytes need not be guarded against; and a client learns why it is not understood."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with client_of() as client:
        for path in BODIES:
            refused = await client.post(path, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
            assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity")
            assert "'gzip'" in refused.json()["error"]["message"]
        plain = await client.post(TEXT, json={"prompt": "x"}, headers={"content-encoding": "Identity"})
        assert plain.status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_numbers_of_any_length(path: str) -> None:
    """Python refuses to print the longest integers; nobody needs to see them."""
    async with client_of() as client:
        for field in ("seed", "n", "max_tokens", "temperature", "priority", "top_k", "prompt", "messages", "input"):
            for digits in (400, 4301, 100_000):
                body = json.dumps(BODIES[path])[:-1] + f', "{field}": -1{"0" * digits}}}'
                response = await client.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code in (200, 400), (field, digits, response.text[:200])
                assert len(response.text) < 2000


async def test_nesting_is_bounded() -> None:
    async with client_of() as client:
        for opening in ("[", '{"a":', '[{"a":'):
            body = '{"prompt": "x", "metadata": ' + opening * 50_000
            response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert "recursion limit" in response.json()["error"]["message"]


async def test_a_request_has_so_many_headers() -> None:
    async with client_of(ServerConfig(h11_max_header_count=20)) as client:
        assert (await client.get("/health", headers={f"x-{i}": "" for i in range(10)})).status_code == 200
        refused = await client.get("/health", headers={f"x-{i}": "" for i in range(20)})
    assert refused.status_code == 431
    assert "at most 20" in refused.json()["error"]["message"]


async def test_headers_have_so_many_bytes() -> None:
    async with client_of(ServerConfig(h11_max_incomplete_event_size=2000, api_key=("k",))) as client:
        assert (await client.get("/health", headers={"x-a": "a" * 1500})).status_code == 200
        for path in ("/health", "/v1/models"):  # a stranger learns it before anything is said of keys
            refused = await client.get(path, headers={"x-a": "a" * 2000})
            assert refused.status_code == 431
            assert "at most 2000" in refused.json()["error"]["message"]


async def test_a_body_has_one_length() -> None:
    """What a proxy reads as the end of this request and what we do must be the same."""
    headers = {"content-length": "4", "transfer-encoding": "chunked"}
    async with client_of(ServerConfig(api_key=("k",))) as client:
        refused = await client.post("/v1/models", content=b"", headers=headers)
    assert (refused.status_code, refused.headers["connection"]) == (400, "close")
    assert "Transfer-Encoding" in refused.json()["error"]["message"]


async def test_a_body_over_the_limit_names_both() -> None:
    async with client_of(ServerConfig(max_body_bytes=2000)) as client:
        for length in ("2001", "9" * 30, "9" * 5000):
            refused = await client.post("/v1/completions", content=b"", headers={"content-length": length})
            message = refused.json()["error"]["message"]
            assert (refused.status_code, length[:20] in message, "2000" in message) == (413, True, True)


def test_every_list_of_every_body_is_bounded() -> None:
    seen: set[type] = set()
    unbounded: list[tuple[str, str]] = []

    def look(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
            seen.add(annotation)
            for name, field in annotation.model_fields.items():
                schema = annotation.model_json_schema()["properties"].get(field.alias or name, {})
                if (annotation.__name__, name) != ("CompletionRequest", "prompt"):  # has a check of its own, above
                    unbounded.extend((annotation.__name__, name) for _ in lists_without_end(schema))
                look(field.annotation)
        for inner in get_args(annotation):
            look(inner)

    def walk(routes: Any) -> None:
        for route in routes:
            walk(getattr(getattr(route, "original_router", None), "routes", ()))
            if (body := getattr(route, "body_field", None)) is not None:
                look(body.field_info.annotation)

    walk(build_app(ServerState([ServedModel("m")])).routes)
    assert len(seen) > 20
    assert unbounded == []


def lists_without_end(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return [found for one in schema for found in lists_without_end(one)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "array" and "maxItems" not in schema else []
    return own + [found for one in schema.values() for found in lists_without_end(one)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        (10**5000, "an integer of 16610 bits"),
        ("a\n\ud800", '"a\\n\\ud800"'),
        ("x" * 49, '"' + "x" * 48 + '"... (49 characters)'),
        ([1, 2], "an array of 2"),
        ({"a": 1}, "an object"),
    ],
    ids=itertools.count(),
)
def test_values_are_shown_briefly(value: Any, text: str) -> None:
    assert shown(value) == text


def test_a_field_called_body_is_found() -> None:
    class Model(BaseModel):
        body: list[int | bool]

    try:
        Model.model_validate({"body": ["a"]}, strict=True)
    except ValueError as error:
        message, field = describe_fields(error.errors(), {"body": ["a"]})  # type: ignore[attr-defined]
    assert (message, field) == ('body[0]: must be an integer or true or false, got "a"', "body")


class NotingTokenizer(FakeTokenizer):
    """Notes on which thread tokens are spelt."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def token_bytes(self, token_id: int) -> bytes:
        self.threads.add(threading.get_ident())
        return super().token_bytes(token_id)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**BODIES[CHAT], "logprobs": True, "top_logprobs": 5}),
        (TEXT, {"prompt": "x", "logprobs": 5, "echo": True}),
        (RESPONSES, {"input": "x", "top_logprobs": 5}),
    ],
)
async def test_logprobs_of_whole_answers_are_written_beside_the_event_loop(path: str, body: dict[str, Any]) -> None:
    engine, tokenizer = FakeEngine(), NotingTokenizer()
    engine.tokenizer = tokenizer
    async with client_of(engine=engine) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads


STRICT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}, {"user": "u", "session_id": "s"}),
    ("/v1/chat/completions", BODIES[CHAT], {"user": "u", "session_id": "s"}),
    ("/v1/responses", {"input": "x"}, {"service_tier": "auto", "reasoning": {"effort": "low"}}),
    ("/v1/responses/input_tokens", {"input": "x"}, {"max_output_tokens": 3, "seed": 1}),
    ("/tokenize", {"prompt": "x"}, {"add_special_tokens": True}),
    ("/detokenize", {"tokens": [97]}, {"model": "m"}),
]


async def test_a_strict_server_refuses_unknown_fields() -> None:
    async with client_of(ServerConfig(strict=True)) as client:
        for path, base, known in STRICT:
            assert (await client.post(path, json={**base, **known})).status_code == 200, path
            error = (await client.post(path, json={**base, "temprature": 1})).json()["error"]
            assert (error["code"], error["param"]) == (400, "temprature")
            assert "--strict" in error["message"]
