"""Drafts: where the n-gram drafter finds them, and that the model runner tells right ones from wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import SchedulerConfig, SpeculativeConfig
from octavo.config.choices import DRAFTERS
from octavo.exceptions import ConfigError
from octavo.messages import OutputOptions, SamplingParams
from octavo.worker.spec_decode.drafter import NullDrafter
from octavo.worker.spec_decode.methods.ngram import NgramDrafter
from octavo.worker.spec_decode.registry import make_drafter
from tests.worker.test_model_runner import OUTPUT, PARAMS, PROMPTS, result_of, run_alone
from tests.worker.tiny_model import MAX_LEN, VOCAB, Driver, all_blocks, make_runner, new_request, random_weights


def ngram(count: int, low: int, high: int) -> NgramDrafter:
    drafter = make_drafter(
        SpeculativeConfig(method="ngram", num_speculative_tokens=count, prompt_lookup_min=low, prompt_lookup_max=high)
    )
    assert isinstance(drafter, NgramDrafter)
    return drafter


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 7, 0, 1, 2, 8, 0, 1, 2], [8, 0, 1]),  # the later of two
        ([9, 1, 2, 7, 0, 1, 2, 8, 9, 1, 2], [7, 0, 1]),  # the longer before the later
        ([1, 2, 1, 2], [1, 2, 1]),  # the draft goes on with its own tokens
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 2], []),  # one token is not enough
        ([1], []),
        ([4, 4], []),
    ],
)
def test_what_an_ngram_is_followed_by(tokens: list[int], draft: list[int]) -> None:
    assert ngram(3, 2, 3).continuation(np.array(tokens, np.int32)) == draft


def slow_continuation(tokens: list[int], count: int, low: int, high: int) -> list[int]:
    """The definition, by trying everything."""
    for size in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                whole = list(tokens)
                for i in range(count):
                    whole.append(whole[end + i])
                return whole[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_every_continuation_equals_the_slow_one(tokens: list[int], count: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert ngram(count, low, high).continuation(np.array(tokens, np.int32)) == slow_continuation(
        tokens, count, low, high
    )


def test_a_busy_step_looks_nothing_up() -> None:
    states = make_runner()._states
    for i in range(3):
        states.add(new_request(f"r{i}", [1, 2, 3, 1, 2], SamplingParams(), block_ids=all_blocks(i)))
    assert ngram(2, 1, 2).propose(states, ["r0", "r2"]) == {"r0": [3, 1], "r2": [3, 1]}
    assert ngram(2, 1, 2).propose(states, ["r0", "a sibling"]) == {"r0": [3, 1]}
    assert ngram(2, 1, 2).propose(states, ["r0", "r1", "r2"]) == {}


def test_without_a_method_there_are_no_drafts() -> None:
    drafter = make_drafter(None)
    assert isinstance(drafter, NullDrafter)
    assert drafter.propose(make_runner()._states, ["r"]) == {}


def test_logits_are_kept_for_every_draft_of_a_step() -> None:
    def most(sequences: int, tokens: int, batch: int, drafts: int = 4) -> int:
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, disable_by_batch_size=batch)
        return SchedulerConfig(
            max_num_seqs=sequences, max_num_batched_tokens=tokens, speculative_config=speculative
        ).most_sampled

    assert SchedulerConfig(max_num_seqs=8).most_sampled == 8
    assert most(64, 256, 2) == 64
    assert most(8, 256, 2) == 10
    assert most(8, 256, 100) == 40  # there are no more sequences
    assert most(8, 30, 100) == 30


def test_every_method_has_a_drafter() -> None:
    for method in DRAFTERS:
        config = SpeculativeConfig(method=method, num_speculative_tokens=2)
        assert not isinstance(make_drafter(config), NullDrafter)
    with pytest.raises(ConfigError, match=r"eagle.*ngram"):
        SpeculativeConfig(method="eagle", num_speculative_tokens=2)


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], list[object], list[object]]]:
    return [run_alone(index) for index in range(len(PROMPTS))]


def speculate(driver: Driver, drafts: dict[str, list[int]]) -> None:
    """A step of every request with its draft; what was wrong is computed again later."""
    output = driver.step({name: 1 + len(ids) for name, ids in drafts.items()}, draft_token_ids=drafts)
    assert not output.errors
    for name, ids in drafts.items():
        driver.computed[name] -= 1 + len(ids) - len(output.sampled_token_ids[name])


@pytest.mark.parametrize("wrong", [1, 2, 3, 5, 1000])
def test_tokens_and_logprobs_with_drafts_are_those_without(alone, wrong: int) -> None:
    """All requests in one batch, every ``wrong``-th token of their drafts wrong, drafts of many lengths."""
    driver = Driver(make_runner())
    new = [
        new_request(f"r{i}", prompt, params, block_ids=all_blocks(i), output=OutputOptions(eos_token_ids=[2]))
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))
    ]
    driver.step({request.request_id: len(request.token_ids) for request in new}, new)
    steps = 0
    while any(len(driver.tokens(request.request_id)) < OUTPUT for request in new):
        steps += 1
        drafts = {}
        for i in range(len(new)):
            known = len(driver.tokens(f"r{i}"))
            if known < OUTPUT:
                draft = alone[i][0][known : OUTPUT - 1][: (i + steps) % 5]
                drafts[f"r{i}"] = [t if (known + at) % wrong else (t + 1) % VOCAB for at, t in enumerate(draft, 1)]
        speculate(driver, drafts)
    assert [result_of(driver, f"r{i}") for i in range(len(new))] == alone
    assert (steps == OUTPUT - 1) == (wrong == 1)


def test_what_fails_behind_a_draft_fails_as_the_first_of_the_next_step() -> None:
    """The first two tokens can only be 7, and the third nothing."""
    driver = Driver(make_runner())
    params = SamplingParams(temperature=0.0, allowed_token_ids=[7], max_tokens=8)
    request = new_request(
        "r", [1, 2, 3], params, block_ids=all_blocks(0), output=OutputOptions(bad_words_token_ids=[[7, 7, 7]])
    )
    other = new_request("s", [4, 5], PARAMS[1], block_ids=all_blocks(1))
    assert driver.step({"r": 3, "s": 2}, [request, other]).sampled_token_ids["r"] == [7]
    output = driver.step({"r": 4, "s": 1}, draft_token_ids={"r": [7, 7, 7]})
    assert output.sampled_token_ids["r"] == [7]
    assert not output.errors
    driver.computed["r"] -= 3
    output = driver.step({"r": 1, "s": 1})
    assert "no token is left" in output.errors["r"].message
    assert "r" not in output.sampled_token_ids
    assert output.sampled_token_ids["s"]


def test_logits_that_are_not_finite_behind_a_draft() -> None:
    """Token 9 has NaN as its embedding: only the request that tries it would see it, and it does not choose it."""
    arrays = random_weights()
    arrays["embed_tokens"] = arrays["embed_tokens"].copy()
    arrays["embed_tokens"][9] = np.nan
    driver = Driver(make_runner(arrays=arrays))
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={9: -100.0})
    driver.step({"r": 3}, [new_request("r", [1, 2, 3], params, block_ids=all_blocks(0))])
    expected = Driver(make_runner(arrays=arrays))
    expected.step({"r": 3}, [new_request("r", [1, 2, 3], params, block_ids=all_blocks(0))])
    for _ in range(3):
        expected.step({"r": 1})
    for _ in range(3):
        speculate(driver, {"r": [9, 9]})
    assert driver.tokens("r") == expected.tokens("r")


def test_drafts_that_do_not_fit_fail_their_request_alone() -> None:
    driver = Driver(make_runner())
    prompt = [1] * (MAX_LEN - 2)
    new = [new_request(name, prompt, PARAMS[0], block_ids=all_blocks(i)) for i, name in enumerate("rs")]
    driver.step({"r": len(prompt), "s": len(prompt)}, new)
    output = driver.step({"r": 5, "s": 1}, draft_token_ids={"r": [1, 1, 1, 1]})
    assert "internal error" in output.errors["r"].message
    assert len(output.sampled_token_ids["s"]) == 1
