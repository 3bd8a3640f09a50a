"""A21: prompts without tokens or with none of the model's, and counts out of range: a 400 that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.input_processor import InputProcessor
from octavo.exceptions import ValidationError
from octavo.messages import EngineInfo
from octavo.tokenizer import load_tokenizer
from tests.cases.asking import answered, ask, refused
from tests.engine.tiny_llama import VOCAB, make_config, write_model, write_tokenizer
from tests.server.running_server import RunningServer


@pytest.mark.parametrize("prompt", [[], [[]], ["a", []], [[1], []], None, {}, 7, True, [None], [1, "a"], [[1], "a"]])
def test_what_is_no_prompt(live_server: RunningServer, prompt: Any) -> None:
    refused(ask(live_server, prompt=prompt), "prompt")


@pytest.mark.parametrize("token", [-1, 49152, 2**31, 2**40, -(2**63), 10**30])
@pytest.mark.parametrize("form", ["one", "second"])
def test_ids_outside_the_vocabulary(live_server: RunningServer, form: str, token: int) -> None:
    prompt: Any = [5, token] if form == "one" else [[5], [6, token]]
    refused(ask(live_server, prompt=prompt), "prompt", str(token), "49151")


def test_an_empty_text_is_bos(live_server: RunningServer) -> None:
    for prompt in ("", [""]):
        body = answered(ask(live_server, prompt=prompt, max_tokens=1, return_token_ids=True))
        assert len(body["choices"][0]["prompt_token_ids"]) == 1


def test_an_empty_text_without_bos_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("no-bos")
    write_tokenizer(folder)
    write_model(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    info = EngineInfo(max_model_len=64, vocab_size=VOCAB, num_blocks=9, block_size=16, kv_cache_bytes=1)
    processor = InputProcessor(load_tokenizer(str(folder)), info, make_config(str(folder)))
    for prompt in ("", []):
        with pytest.raises(ValidationError, match="BOS") as caught:
            processor.process(prompt, SamplingParams())
        assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("messages", [[], None, {}, "hi", [{}], [{"role": "user", "content": 5}], [[]]])
def test_what_is_no_conversation(live_server: RunningServer, messages: Any) -> None:
    refused(ask(live_server, "/v1/chat/completions", messages=messages, max_tokens=1), "messages")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("count", [0, -1, 2**62, 10**40])
def test_max_tokens_out_of_range(live_server: RunningServer, path: str, count: int) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    refused(ask(live_server, path, **prompt, max_tokens=count), "max_tokens")
    if path != "/v1/completions":
        refused(ask(live_server, path, **prompt, max_completion_tokens=count), "max_completion_tokens")


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_max_tokens_by_default(live_server: RunningServer, fields: dict[str, Any]) -> None:
    body = answered(ask(live_server, prompt="x", ignore_eos=True, **fields))
    assert body["usage"]["completion_tokens"] == 16


def test_nothing_but_the_prompt(live_server: RunningServer) -> None:
    body = answered(ask(live_server, prompt="Tick tock", max_tokens=0, echo=True, logprobs=0))
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("Tick tock", 0)
    refused(ask(live_server, prompt="Tick tock", max_tokens=0), "max_tokens", "echo")


def test_in_python(llm: LLM) -> None:
    for prompt in ([49152], [-1], {"prompt_token_ids": [2**40]}):
        with pytest.raises(ValidationError):
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.generate([], SamplingParams(max_tokens=1), use_tqdm=False) == []
    (output,) = llm.generate({"prompt_token_ids": []}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.prompt_token_ids) == 1
