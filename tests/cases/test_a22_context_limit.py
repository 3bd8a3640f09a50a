"""A22: prompt + max_tokens may be exactly the context; one more is a 400 with all three numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.exceptions import ValidationError
from tests.cases.asking import answered, ask, refused
from tests.cases.conftest import MAX_MODEL_LEN as LIMIT
from tests.engine.tiny_llama import write_model, write_tokenizer
from tests.server.running_server import RunningServer

WORDS = [{"role": "user", "content": "Count as far as you can: 1 2 3 4"}]


def prompt_of(length: int) -> list[int]:
    return [1000 + i % 50 for i in range(length)]


@pytest.mark.parametrize(("prompt", "output"), [(8, LIMIT - 7), (LIMIT - 1, 2), (1, LIMIT), (500, 10**6)])
def test_one_too_many(live_server: RunningServer, prompt: int, output: int) -> None:
    numbers = (str(LIMIT), str(prompt), str(output), str(prompt + output))
    refused(ask(live_server, prompt=prompt_of(prompt), max_tokens=output), "max_tokens", *numbers)


def test_exactly_the_limit(live_server: RunningServer) -> None:
    for prompt in (LIMIT - 1, LIMIT - 9):
        asked = {"prompt": prompt_of(prompt), "max_tokens": LIMIT - prompt, "ignore_eos": True}
        body = answered(ask(live_server, **asked))
        assert body["usage"]["total_tokens"] == LIMIT
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_no_room_for_an_answer(live_server: RunningServer, length: int) -> None:
    refused(ask(live_server, prompt=prompt_of(length), max_tokens=1), "prompt", str(LIMIT), str(length))
    refused(ask(live_server, prompt=[[5], prompt_of(length)]), "prompt", str(length))


def test_no_number_given(live_server: RunningServer) -> None:
    """Chat goes on to the end of the context; completions make 16 tokens, or fewer where it ends."""
    long = [{"role": "user", "content": "word " * (LIMIT - 200)}]
    chat = answered(ask(live_server, "/v1/chat/completions", messages=long, ignore_eos=True))
    assert chat["usage"]["total_tokens"] == LIMIT
    assert chat["choices"][0]["finish_reason"] == "length"
    body = answered(ask(live_server, prompt=prompt_of(LIMIT - 5), ignore_eos=True))
    assert body["usage"]["completion_tokens"] == 5
    too_long = [{"role": "user", "content": "word " * (LIMIT + 50)}]
    refused(ask(live_server, "/v1/chat/completions", messages=too_long), "messages", str(LIMIT))


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-10, None)), ("right", slice(10)), (None, slice(-10, None))])
def test_truncation(live_server: RunningServer, side: str | None, kept: slice) -> None:
    prompt = list(range(1000, 1300))
    asked: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True, "truncation_side": side}
    body = answered(ask(live_server, prompt=prompt, truncate_prompt_tokens=10, **asked))
    assert body["choices"][0]["prompt_token_ids"] == prompt[kept]
    assert body["usage"]["prompt_tokens"] == 10


def test_truncation_to_what_fits(live_server: RunningServer) -> None:
    prompt = prompt_of(LIMIT + 500)
    body = answered(ask(live_server, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=4, ignore_eos=True))
    assert body["usage"]["prompt_tokens"] == LIMIT - 4
    assert body["usage"]["total_tokens"] == LIMIT
    refused(ask(live_server, prompt=prompt, truncate_prompt_tokens=LIMIT, max_tokens=1), "prompt", str(LIMIT))
    for wrong in (0, -2, 1.5):
        refused(ask(live_server, prompt="x", truncate_prompt_tokens=wrong), "truncate_prompt_tokens")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("short")
    write_tokenizer(folder)
    write_model(folder)
    with LLM(str(folder), max_model_len=64, backend="reference", kv_cache_memory="1MiB", max_num_seqs=4) as llm:
        yield llm


def test_in_python(short: LLM) -> None:
    for prompt, output in ((8, 57), (63, 2)):
        with pytest.raises(
            ValidationError, match=f"64 tokens.*{prompt} in the prompt and {output} for the output"
        ) as caught:
            short.generate([[9] * prompt], SamplingParams(max_tokens=output), use_tqdm=False)
        assert caught.value.parameter == "max_tokens"
    with pytest.raises(ValidationError, match="64 tokens"):
        short.generate([[9] * 64], SamplingParams(max_tokens=None), use_tqdm=False)
    for prompt, asked in ((8, 56), (63, 1), (8, None), (63, None)):
        (output,) = short.generate([[9] * prompt], SamplingParams(max_tokens=asked, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 64 - prompt
        assert output.outputs[0].finish_reason == "length"
