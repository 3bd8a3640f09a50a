"""A17: a request that the whole KV pool cannot hold is refused at once; one that outgrows it ends; nobody starves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from octavo.exceptions import ValidationError

TOKENS = 240  # of a pool of 16 blocks, one of which is the null block


@pytest.fixture(scope="module")
def small(smollm2_path: str) -> Iterator[LLM]:
    with LLM(smollm2_path, max_model_len=4096, kv_cache_memory=16 * 16 * 23040, max_num_seqs=8) as one:
        yield one


@pytest.fixture(autouse=True)
def whole(small: LLM) -> Iterator[None]:
    yield
    engine = small._live_engine()
    assert not engine.has_unfinished()
    engine.drain()
    engine.check_invariants()


def prompt_of(length: int) -> list[int]:
    return [1000 + i % 700 for i in range(length)]


def test_the_context_is_what_the_pool_holds_and_the_log_says_so(
    smollm2_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        LLM(smollm2_path, max_model_len=4096, kv_cache_memory=16 * 16 * 23040) as llm,
    ):
        assert llm._live_engine().info.max_model_len == TOKENS
    assert "max_model_len is 240 instead of 4096" in caplog.text


@pytest.mark.parametrize("length", [TOKENS, 300, 4000])
def test_a_prompt_that_can_never_fit_is_refused_naming_both_numbers(small: LLM, length: int) -> None:
    with pytest.raises(ValidationError, match=rf"{TOKENS}.*{length}|{length}.*{TOKENS}") as caught:
        small.generate([prompt_of(5), prompt_of(length)], use_tqdm=False)
    assert caught.value.parameter == "prompt"


def test_one_that_outgrows_it_ends_with_length_and_the_one_behind_completes(small: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (TOKENS - 200, 7)]
    big, little = small.generate([prompt_of(200), prompt_of(5)], params, use_tqdm=False)
    assert (len(big.outputs[0].token_ids), big.outputs[0].finish_reason) == (TOKENS - 200, "length")
    assert len(little.outputs[0].token_ids) == 7
    (unbounded,) = small.generate(prompt_of(200), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(unbounded.outputs[0].token_ids) == TOKENS - 200
    assert unbounded.outputs[0].finish_reason == "length"


def test_a_crowd_whose_members_fit_only_alone(small: LLM) -> None:
    """Samples and beams too: what they share and what they hold while waiting must never lock the pool."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [prompt_of(180 + i) for i in range(4)]
    outputs = small.generate(prompts, params.replace(n=3, temperature=1, seed=5), use_tqdm=False)
    assert [[len(sample.token_ids) for sample in output.outputs] for output in outputs] == [[40] * 3] * 4
    (alone,) = small.generate(prompts[2], params.replace(n=3, temperature=1, seed=5), use_tqdm=False)
    assert alone.outputs == outputs[2].outputs
