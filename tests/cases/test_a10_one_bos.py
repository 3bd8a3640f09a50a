"""A10: a template that writes BOS, a tokenizer that adds it: a conversation begins with one, on every road."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, processors

from octavo import LLM, SamplingParams
from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.cases.asking import answered, ask
from tests.engine.tiny_llama import BOS, make_config, write_model, write_tokenizer
from tests.server.running_server import RunningServer

MESSAGES = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose template begins with bos_token and whose tokenizer puts BOS before every text."""
    path: Path = tmp_path_factory.mktemp("bos")
    write_tokenizer(path)
    write_model(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ bos_token }}" + settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


@pytest.fixture(scope="module")
def offline(folder: str) -> Iterator[LLM]:
    with LLM(folder, backend="reference", kv_cache_memory="1MiB", max_num_seqs=2) as llm:
        yield llm


@pytest_asyncio.fixture
async def client(folder: str) -> AsyncIterator[httpx.AsyncClient]:
    engine = await AsyncLLM.create(make_config(folder))
    transport = httpx.ASGITransport(build_app(ServerState([ServedModel("m", engine=engine)])))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        yield client
    await engine.shutdown()


def test_offline(offline: LLM) -> None:
    tokenizer, one = offline.get_tokenizer(), SamplingParams(max_tokens=1)
    (chat,) = offline.chat(MESSAGES, one, use_tqdm=False)
    assert chat.prompt is not None
    assert chat.prompt.startswith(BOS)
    assert tokenizer.bos_token_id is not None
    assert chat.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    (written,) = offline.generate(chat.prompt, one, use_tqdm=False)
    assert written.prompt_token_ids == chat.prompt_token_ids
    (text,) = offline.generate("the lazy dog", one, use_tqdm=False)
    assert text.prompt_token_ids[0] == tokenizer.bos_token_id  # plain text does get one


async def test_over_http(client: httpx.AsyncClient, offline: LLM) -> None:
    (expected,) = offline.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)
    ids = expected.prompt_token_ids
    asked = {"max_tokens": 1, "return_token_ids": True}
    chat = (await client.post("/v1/chat/completions", json={**asked, "messages": MESSAGES})).json()
    assert chat["prompt_token_ids"] == ids
    text = (await client.post("/v1/completions", json={**asked, "prompt": expected.prompt})).json()
    assert text["choices"][0]["prompt_token_ids"] == ids
    assert (await client.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"] == ids
    twice = {**asked, "messages": MESSAGES, "add_special_tokens": True}
    assert (await client.post("/v1/chat/completions", json=twice)).json()["prompt_token_ids"] == ids


def test_tokenize_says_what_chat_computes(live_server: RunningServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße \U0001f642"}]
    chat = ask(live_server, "/v1/chat/completions", messages=messages, return_token_ids=True, max_tokens=1)
    tokens = answered(ask(live_server, "/tokenize", messages=messages))["tokens"]
    assert answered(chat)["prompt_token_ids"] == tokens
