"""A request's own chat template: refused by default; where trusted, it can hurt its own request alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from octavo.config import ChatConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.chat.chat_format import detect
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.tokenizer import chat_template
from tests.server.fake_engine import FakeEngine, FakeTokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
PATHS = ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize")


class RenderingTokenizer(FakeTokenizer):
    """Renders for real, and notes on which thread a request's template ran."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        template = options.pop("chat_template", None)
        if template is None:
            return super().apply_chat_template(messages, **options)
        self.threads.append(threading.get_ident())
        return chat_template.render(
            template,
            messages,
            add_generation_prompt=options.pop("add_generation_prompt"),
            continue_final_message=options.pop("continue_final_message", False),
            variables=options,
        )


def client_of(tokenizer: FakeTokenizer, *, trust: bool) -> httpx.AsyncClient:
    engine = FakeEngine()
    engine.tokenizer = tokenizer
    state = ServerState([ServedModel("m", engine=engine, chat_config=ChatConfig(trust_request_chat_template=trust))])  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(state)), base_url="http://octavo")


@pytest.mark.parametrize("path", PATHS)
async def test_templates_of_requests_are_refused_unless_trusted(path: str) -> None:
    async with client_of(RenderingTokenizer(), trust=False) as client:
        error = (await client.post(path, json={**CHAT, "chat_template": "x"})).json()["error"]
    assert (error["code"], error["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_trusted_template_runs_beside_the_event_loop(path: str) -> None:
    tokenizer = RenderingTokenizer()
    async with client_of(tokenizer, trust=True) as client:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert (await client.post(path, json={**CHAT, "chat_template": template})).status_code == 200
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads


class NotingTokenizer(FakeTokenizer):
    """Notes on which thread conversations are rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        self.threads.append(threading.get_ident())
        return super().apply_chat_template(messages, **options)


@pytest.mark.parametrize("path", PATHS)
async def test_a_large_conversation_is_rendered_beside_the_event_loop(path: str) -> None:
    tokenizer = NotingTokenizer()
    async with client_of(tokenizer, trust=False) as client:
        assert (await client.post(path, json=CHAT)).status_code == 200
        assert set(tokenizer.threads) == {threading.get_ident()}
        for more in ({"messages": [{"role": "user", "content": "x" * 70_000}]}, {"documents": [{"a": "x" * 70_000}]}):
            tokenizer.threads.clear()
            await client.post(path, json={**CHAT, **more})
            assert tokenizer.threads
            assert threading.get_ident() not in tokenizer.threads


async def test_an_endless_template_ends_its_request_and_no_other() -> None:
    async with client_of(RenderingTokenizer(), trust=True) as client:
        evil = asyncio.create_task(client.post(PATHS[0], json={**CHAT, "chat_template": ENDLESS}))
        while not evil.done():
            assert (await client.post(PATHS[0], json=CHAT)).status_code == 200
        error = (await evil).json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    assert "s of computation" in error["message"]


def test_a_slow_template_is_tried_once() -> None:
    """Not once for each thing that is asked of a template: each trial may take half a second."""
    tokenizer = RenderingTokenizer()
    found = detect(tokenizer, ChatConfig(), ENDLESS)  # type: ignore[arg-type]
    assert len(tokenizer.threads) <= 2
    assert not found.takes_tools
