"""A02: a bias on an id that is no token, or by a number that is none, harms its own request only."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.exceptions import ValidationError
from tests.cases.asking import answered, ask, ask_raw, refused
from tests.server.running_server import RunningServer

VOCAB = 49152  # width of the logits


@pytest.mark.parametrize("key", [str(VOCAB), "123456789012345678901", "-3", "dog", "1.5", ""])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_key_that_is_no_token_is_named(live_server: RunningServer, path: str, key: str) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    refused(ask(live_server, path, **prompt, logit_bias={key: 1}), "logit_bias", key)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999", '"5"', "null", "true"])
def test_a_bias_that_is_no_number_is_refused(live_server: RunningServer, number: str) -> None:
    refused(ask_raw(live_server, f'{{"prompt": "x", "logit_bias": {{"7": {number}}}}}'), "logit_bias", "7")


def test_biases_beyond_a_hundred_are_clamped(live_server: RunningServer) -> None:
    fields = {"prompt": "Rain and", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    for given, clamped in ((3e38, 100), (-7000, -100), (10**400, 100), (-(10**400), -100)):
        answers = [answered(ask(live_server, **fields, logit_bias={"284": bias})) for bias in (given, clamped)]
        assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


def test_the_last_id_of_the_vocabulary_is_one(llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(max_tokens=2, temperature=0, logit_bias={VOCAB - 1: 100}))
    assert output.outputs[0].token_ids == [VOCAB - 1] * 2
    with pytest.raises(ValidationError, match=str(VOCAB)):
        llm.generate("x", SamplingParams(logit_bias={VOCAB: 100}))
