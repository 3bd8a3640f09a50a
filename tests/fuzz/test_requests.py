"""Any bytes as a request: an answer or a refusal, never a 500; and nothing is left running."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given

from octavo.config import ChatConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.fuzz.mutation import corpus, damaged, quick, twisted
from tests.server.fake_engine import FakeEngine, ToolTokenizer

SEEDS = corpus("requests")
PATHS = [
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *(
        "/v1/responses/input_tokens",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/tokenize",
        "/detokenize",
    ),
]


def fits(path: str, seed: bytes) -> bool:
    """Whether a body has the field that ``path`` needs."""
    fields = json.loads(seed)
    name = next((n for n in ("completions", "responses", "detokenize") if n in path and "chat" not in path), "messages")
    need = {"completions": "prompt", "responses": "input", "detokenize": "tokens"}.get(name, "messages")
    return need in fields


def answered(path: str, content: bytes) -> None:
    engine = FakeEngine(max_model_len=2048)
    engine.tokenizer = ToolTokenizer()
    state = ServerState([ServedModel("m", engine=engine, chat_config=ChatConfig(trust_request_chat_template=True))])  # type: ignore[arg-type]

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"})

    response = asyncio.run(post())
    assert response.status_code in (200, 400, 404), response.text
    if "event-stream" in response.headers["content-type"]:
        assert '"code":500' not in response.text
    else:
        body: Any = json.loads(response.text, parse_constant=lambda word: pytest.fail(f"{word} in an answer"))
        assert response.status_code == 200 or body["error"]["message"]
    assert engine.running == 0


@pytest.mark.parametrize("path", PATHS)
@quick
@given(content=twisted(SEEDS))
def test_odd_values(path: str, content: bytes) -> None:
    answered(path, content)


@quick
@given(content=damaged(SEEDS))
def test_damaged_bytes(content: bytes) -> None:
    for path in PATHS[:4]:
        answered(path, content)


@pytest.mark.parametrize("path", PATHS)
def test_the_seeds(path: str) -> None:
    bodies = [seed for seed in SEEDS if fits(path, seed)]
    assert bodies
    for body in SEEDS:
        answered(path, body)
