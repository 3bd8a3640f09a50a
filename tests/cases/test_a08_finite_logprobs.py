"""A08: every number in an answer is finite, whatever was excluded; the token itself is always there; ranks ascend."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.cases.asking import answered, ask
from tests.server.running_server import RunningServer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Name a colour."}], "logprobs": True, "max_tokens": 4}


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        return [n for part in (value.values() if isinstance(value, dict) else value) for n in numbers(part)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 1, "temperature": 1, "top_k": 1},
        {"echo": True, "logprobs": 5, "allowed_token_ids": [5]},
        {"logprobs": 5, "allowed_token_ids": [7, 8], "logit_bias": {"7": -100}, "temperature": 0.1},
        {"logprobs": 0, "bad_words": ["blue", "red"], "min_p": 1.0},
        {"prompt_logprobs": 3, "top_p": 1e-9, "logprobs": 2},
        {"logprob_token_ids": [0, 49151], "repetition_penalty": 1e6},
    ],
)
def test_completions(live_server: RunningServer, fields: dict[str, Any]) -> None:
    response = ask(live_server, prompt="A clear sky is coloured", max_tokens=4, **fields)
    body = json.loads(response.text, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))
    assert response.status_code == 200
    logprobs = body["choices"][0]["logprobs"]
    assert all(
        -9999.0 <= value <= 0 for value in numbers(logprobs["top_logprobs"]) + numbers(logprobs["token_logprobs"])
    )
    for token, own, table in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert table is None or table[token] == own


def test_chat_with_two_tokens_left(live_server: RunningServer) -> None:
    body = answered(ask(live_server, "/v1/chat/completions", **CHAT, top_logprobs=5, allowed_token_ids=[48000, 48001]))
    for entry in body["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 6  # the five likeliest, and the token itself, which is none of them
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][-1]["token"] == entry["token"]
        assert values[-1] == entry["logprob"]
        assert math.isfinite(entry["logprob"])
        for shown in (entry, *entry["top_logprobs"]):
            assert bytes(shown["bytes"]).decode("utf-8", "replace") == shown["token"]


def test_chat_with_ids_of_its_own(live_server: RunningServer) -> None:
    asked = {**CHAT, "logprob_token_ids": [28, 30, 49151], "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = answered(ask(live_server, "/v1/chat/completions", **asked))["choices"][0]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token_id}"
        assert {top["token"] for top in entry["top_logprobs"]} == {"token_id:28", "token_id:30", "token_id:49151"}


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_what_was_excluded_has_the_floor(smollm2_path: str, mode: str) -> None:
    asked = SamplingParams(logprobs=6, top_k=2, temperature=0.8, seed=1, max_tokens=3)
    with LLM(smollm2_path, max_model_len=256, kv_cache_memory="16MiB", max_num_seqs=2, logprobs_mode=mode) as llm:
        (output,) = llm.generate("A clear sky is", asked, use_tqdm=False)
    for token_id, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True):
        values = [entry[i].logprob for i in entry]
        assert values.count(-9999.0) == 4
        assert entry[token_id].logprob > -9999.0
        if mode == "processed_logprobs":
            assert sum(math.exp(value) for value in values) == pytest.approx(1, abs=1e-5)
