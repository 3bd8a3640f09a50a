"""A15: what a cached block's KV depends on is in its name: no hit across salts, adapters, media or tokens."""

from __future__ import annotations

import itertools

import pytest

from octavo import LLM, SamplingParams
from octavo.core.kv_cache.hashing import Extra, hash_block
from octavo.engine.outputs import RequestOutput
from tests.cases.asking import answered, ask
from tests.server.running_server import RunningServer

PROMPT = [3000 + 7 * i for i in range(70)]  # four full blocks of 16, and a part of one
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


def run(llm: LLM, salt: str | None, prompt: list[int] = PROMPT) -> RequestOutput:
    (output,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY, use_tqdm=False)
    return output


def test_a_salt_hits_only_itself(llm: LLM) -> None:
    salts = [None, "X", "Y", "X ", "x", "adapter:X", "\0X"]
    first = [run(llm, salt) for salt in salts]
    assert [output.num_cached_tokens for output in first] == [0] * len(salts)
    again = [run(llm, salt) for salt in salts]
    assert [output.num_cached_tokens for output in again] == [64] * len(salts)
    answers = [output.outputs[0] for output in [*first, *again]]
    assert all(answer == answers[0] for answer in answers)


def test_a_salt_hits_only_itself_where_single_tokens_are_found(smollm2_path: str) -> None:
    with LLM(smollm2_path, max_model_len=256, prefix_index="radix") as radix:
        salts = [None, "X", "Y", "x"]
        outputs = [run(radix, salt) for salt in [*salts, *salts]]
        assert [output.num_cached_tokens for output in outputs] == [0] * len(salts) + [69] * len(salts)
        assert all(output.outputs[0] == outputs[0].outputs[0] for output in outputs)
        for place in (1, 15, 16, 40, 69):
            changed = [*PROMPT[:place], PROMPT[place] + 1, *PROMPT[place + 1 :]]
            assert run(radix, "X", changed).num_cached_tokens == place


def test_one_token_makes_another_prefix(llm: LLM) -> None:
    run(llm, "t")
    for place in (0, 15, 16, 40, 63):
        changed = [*PROMPT[:place], PROMPT[place] + 1, *PROMPT[place + 1 :]]
        assert run(llm, "t", changed).num_cached_tokens == place // 16 * 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_over_http(live_server: RunningServer, path: str) -> None:
    text = "A lighthouse keeper counts the ships. " * 12
    system = {"role": "system", "content": text}  # the template's own would be cached by others
    messages = [system, {"role": "user", "content": "How many?"}]
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": messages}
    cached = []
    for salt in ("one", "two", "one", None):
        body = answered(ask(live_server, path, **prompt, cache_salt=salt, max_tokens=1))
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] >= 64
    assert cached[3] == 0


def test_namespaces_of_one_word_are_apart() -> None:
    """Adapter X without a salt, and the base model with the salt X; also where parts could run into each other."""
    tokens = list(range(16))
    extras: list[list[Extra]] = [
        [],
        [("cache_salt", "X")],
        [("adapter", "X")],
        [("media", "X")],
        [("adapter", "X"), ("cache_salt", "X")],
        [("adapter", "Xcache_saltX")],
        [("adapter", "X"), ("media", "X")],
        [("adapter", b"X")],
    ]
    names = [hash_block(None, tokens, one) for one in extras]
    assert all(a != b for a, b in itertools.combinations(names, 2))
    assert {len(name) for name in names} == {32}, "256 bits: equal names are equal contents"
