"""Tags that are special tokens of the vocabulary reach the parsers, and no other special token reaches the client.

A real engine with random weights, which nothing but the constraint could make call a tool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.engine.tiny_llama import make_config, write_model, write_tokenizer

TAGS = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]")
TEMPLATE = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}[INST]{{ m.content }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{% endfor %}
{%- if thinks %}[THINK]{% endif %}"""
PAINT = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "paint", "parameters": PAINT}}],
    "max_tokens": 80,
    "seed": 1,
    "return_token_ids": True,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder: Path = tmp_path_factory.mktemp("tagged")
    write_tokenizer(folder, TEMPLATE, TAGS)
    write_model(folder)
    engine = await AsyncLLM.create(make_config(str(folder)))
    transport = httpx.ASGITransport(app=build_app(ServerState([ServedModel("m", engine=engine)])))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client
    await engine.shutdown()


async def choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_a_demanded_call_begins_with_its_special_token(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["tool_call_parser"], card["reasoning_parser"]) == ("mistral", "mistral")
    answer = await choice(client, tool_choice="required", parallel_tool_calls=False, thinking_token_budget=0)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert call["function"]["arguments"].replace(" ", "") in ('{"colour":"red"}', '{"colour":"green"}')
    assert len(call["id"]) == 9
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None


@pytest.mark.asyncio(loop_scope="module")
async def test_thinking_ends_in_time_and_a_call_follows(client: httpx.AsyncClient) -> None:
    fields = {"tool_choice": {"type": "function", "function": {"name": "paint"}}, "thinking_token_budget": 9}
    body = {**ASK, **fields, "chat_template_kwargs": {"thinks": True}}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()["choices"][0]
    assert answer["message"]["reasoning"]
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "paint"
    thought = response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 10 <= thought <= 13  # nine and the tag, which does not come within a character


@pytest.mark.asyncio(loop_scope="module")
async def test_no_other_special_token_is_shown(client: httpx.AsyncClient) -> None:
    tags = {"text": "".join(TAGS)}
    ids = (await client.post("/tokenize", json={"prompt": tags["text"], "add_special_tokens": False})).json()["tokens"]
    assert len(ids) == len(TAGS)
    answer = await choice(client, tools=[], allowed_token_ids=ids, max_tokens=20)
    shown = answer["message"]["content"] + answer["message"].get("reasoning", "")
    assert len(answer["token_ids"]) == 20
    assert set(shown.replace("[THINK]", "").replace("[/THINK]", "")) == set()
