"""A09: prompt logprobs are whole, and equal with a warm prefix cache, chunks smaller than the prompt, and company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from tests.cases.asking import answered, ask, events
from tests.server.running_server import RunningServer

TEXT = (
    "A lighthouse keeper wrote down the weather each evening: wind from the west, a falling glass, two ships far out, "
    "and a light rain that stopped before midnight. In the morning the sea was flat and grey, and nobody came."
)
SCORED = SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0)


@pytest.fixture(scope="module")
def plain(smollm2_path: str) -> Iterator[LLM]:
    """The same model without a prefix cache, computing each prompt in one step."""
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": "32MiB", "max_num_seqs": 2}
    with LLM(smollm2_path, **options, enable_prefix_caching=False, enable_chunked_prefill=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def chunked(smollm2_path: str) -> Iterator[LLM]:
    """Chunks of at most 7 tokens, several requests at once."""
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": "32MiB", "max_num_seqs": 4}
    with LLM(smollm2_path, **options, max_num_batched_tokens=7) as llm:
        yield llm


def scored(llm: LLM, count: int = 1) -> list[RequestOutput]:
    return llm.generate([TEXT] * count, SCORED, use_tqdm=False)


def test_equal_whatever_was_cached_or_cut(plain: LLM, chunked: LLM, llm: LLM) -> None:
    (expected,) = scored(plain)
    assert expected.prompt_logprobs is not None
    assert len(expected.prompt_logprobs) == len(expected.prompt_token_ids) > 33
    assert expected.prompt_logprobs[0] is None
    for token_id, entry in zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token_id in entry
    for other in (llm, chunked):
        other.generate([TEXT], SamplingParams(max_tokens=1), use_tqdm=False)  # warms the prefix cache
        for _ in range(2):
            (again,) = scored(other)
            assert again.prompt_logprobs == expected.prompt_logprobs  # to the last bit
    assert [output.prompt_logprobs for output in scored(chunked, 3)] == [expected.prompt_logprobs] * 3


def test_echo_over_http(plain: LLM, live_server: RunningServer) -> None:
    (expected,) = scored(plain)
    assert expected.prompt_logprobs is not None
    ask(live_server, prompt=TEXT, max_tokens=1)
    asked: dict[str, Any] = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answers = [answered(ask(live_server, **asked))["choices"][0] for _ in range(2)]
    assert answers[0] == answers[1]
    logprobs, count = answers[0]["logprobs"], len(expected.prompt_token_ids)
    assert len(logprobs["tokens"]) == count + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    own = [entry[i].logprob for i, entry in zip(expected.prompt_token_ids, expected.prompt_logprobs) if entry]
    assert logprobs["token_logprobs"][1:count] == pytest.approx(own, abs=1e-4)
    assert "".join(logprobs["tokens"]) == answers[0]["text"]
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(count + 1)]
    first = events(live_server, **asked)[0]["choices"][0]
    assert first["logprobs"]["token_logprobs"][:count] == logprobs["token_logprobs"][:count]


def test_scoring_alone(live_server: RunningServer) -> None:
    asked: dict[str, Any] = {"prompt": [TEXT, "Short one"], "echo": True, "logprobs": 2, "max_tokens": 0, "n": 2}
    body = answered(ask(live_server, **asked))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice, text in zip(body["choices"], [TEXT, TEXT, "Short one", "Short one"], strict=True):
        assert choice["text"].endswith(text)
        assert choice["finish_reason"] == "length"
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert body["usage"]["completion_tokens"] == 0


def test_the_long_form(live_server: RunningServer) -> None:
    """vLLM's prompt_logprobs, of chat and completions alike, from a position on and for ids of one's own."""
    whole = answered(ask(live_server, prompt=TEXT, prompt_logprobs=2, max_tokens=1))["choices"][0]["prompt_logprobs"]
    asked: dict[str, Any] = {"prompt": TEXT, "max_tokens": 1, "prompt_logprob_start": 20}
    part = answered(ask(live_server, **asked, prompt_logprobs=2))["choices"][0]["prompt_logprobs"]
    assert part == [None] * 21 + whole[21:]
    some = answered(ask(live_server, **asked, prompt_logprob_token_ids=[5]))["choices"][0]["prompt_logprobs"]
    assert all("5" in entry and len(entry) <= 2 for entry in some[21:])
    messages = [{"role": "user", "content": "Hi"}]
    chat = ask(live_server, "/v1/chat/completions", messages=messages, prompt_logprobs=0, max_tokens=1)
    table = answered(chat)["prompt_logprobs"]
    assert table[0] is None
    assert all(len(entry) == 1 for entry in table[1:])
