"""Every sampling field through the real engine in process: what it does, and that it does so under any conditions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.input_processor import InputProcessor
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.outputs import CompletionOutput, FlatLogprobs
from octavo.exceptions import ValidationError
from octavo.messages import EngineInfo, RequestOutputKind, ThinkingTokens
from octavo.tokenizer import load_tokenizer

from .tiny_llama import VOCAB, make_config

PROMPT = "the quick brown fox"
OPTIONS: dict[str, Any] = {"backend": "reference", "kv_cache_memory": "1MiB", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS, max_logprobs=-1) as one:
        yield one


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | changes))


def one(llm: LLM, prompt: Any = PROMPT, **changes: Any) -> CompletionOutput:
    (output,) = llm.generate(prompt, params(**changes), use_tqdm=False)
    return output.outputs[0]


def test_bad_words_never_appear(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    free = one(llm, max_tokens=200, temperature=1.0, seed=3).token_ids
    pairs = [[*pair] for pair in pairwise(free)]
    banned = [tokenizer.decode(pair) for pair in pairs if tokenizer.encode(tokenizer.decode(pair)) == pair][:2]
    assert len(banned) == 2
    ids = one(llm, max_tokens=200, temperature=1.0, seed=3, bad_words=banned).token_ids
    assert ids != free
    for word in banned:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            banned_ids = tokenizer.encode(text, add_special_tokens=False)
            assert all(ids[at : at + len(banned_ids)] != banned_ids for at in range(len(ids)))
    assert one(llm, prompt=PROMPT + banned[0], bad_words=banned).finish_reason == "length"


def test_bad_words_that_leave_nothing_are_refused(llm: LLM) -> None:
    (token,) = llm.get_tokenizer().encode("t", add_special_tokens=False)
    with pytest.raises(ValidationError, match="bad_words") as caught:
        one(llm, allowed_token_ids=[token], bad_words=["t"])
    assert caught.value.parameter == "allowed_token_ids"
    eos = llm.get_tokenizer().eos_token_ids
    with pytest.raises(ValidationError, match="min_tokens"):
        one(llm, allowed_token_ids=eos, min_tokens=2, ignore_eos=False)
    assert one(llm, allowed_token_ids=eos, ignore_eos=False).finish_reason == "stop"
    with pytest.raises(ValidationError, match="257 words"):
        one(llm, bad_words=["x"] * 257)


def test_repetition_ends_the_answer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    a, b = tokenizer.encode("a", add_special_tokens=False)[0], tokenizer.encode("b", add_special_tokens=False)[0]
    looping: dict[str, Any] = {"allowed_token_ids": [a, b], "max_tokens": 200}
    detect = {"max_pattern_size": 8, "min_count": 4}
    output = one(llm, **looping, repetition_detection=detect)
    assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")
    ids = output.token_ids
    assert any(ids[-4 * size :] == ids[-size:] * 4 for size in range(1, 9))
    assert one(llm, **looping, repetition_detection=detect, min_tokens=50).token_ids[: len(ids)] == ids
    assert len(one(llm, **looping, repetition_detection=detect, min_tokens=50).token_ids) >= 50
    assert one(llm, **looping, repetition_detection={}).finish_reason == "length"


def test_logprob_token_ids_are_what_the_whole_vocabulary_says(llm: LLM) -> None:
    wanted = [5, 300, 7]
    whole, some = one(llm, logprobs=-1), one(llm, logprob_token_ids=wanted)
    assert whole.logprobs is not None
    assert some.logprobs is not None
    for token, everything, few in zip(whole.token_ids, whole.logprobs, some.logprobs, strict=True):
        assert len(everything) == VOCAB
        assert np.exp([lp.logprob for lp in everything.values()]).sum() == pytest.approx(1, abs=1e-5)
        assert list(few) == list(dict.fromkeys([token, *wanted]))
        for token_id, value in few.items():
            assert value.logprob == pytest.approx(everything[token_id].logprob, abs=1e-5)
            assert value.rank == everything[token_id].rank
    assert some.cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("start", [0, 1, 5, 20, 39, 40, 1000])
def test_prompt_logprobs_from_a_position_on(llm: LLM, start: int) -> None:
    prompt = [(7 * i) % 300 + 2 for i in range(40)]
    (whole,) = llm.generate([prompt], params(prompt_logprobs=3, max_tokens=1), use_tqdm=False)
    (part,) = llm.generate([prompt], params(prompt_logprobs=3, prompt_logprob_start=start, max_tokens=1))
    assert whole.prompt_logprobs is not None
    assert part.prompt_logprobs is not None
    assert len(part.prompt_logprobs) == 40
    assert list(part.prompt_logprobs[: start + 1]) == [None] * min(start + 1, 40)
    assert part.prompt_logprobs[start + 1 :] == whole.prompt_logprobs[start + 1 :]


def test_prompt_logprob_token_ids(llm: LLM) -> None:
    prompt = [(7 * i) % 300 + 2 for i in range(20)]
    (whole,) = llm.generate([prompt], params(prompt_logprobs=-1, max_tokens=1), use_tqdm=False)
    (some,) = llm.generate([prompt], params(prompt_logprob_token_ids=[9, 4], max_tokens=1), use_tqdm=False)
    assert whole.prompt_logprobs is not None
    assert some.prompt_logprobs is not None
    for token, everything, few in zip(prompt[1:], whole.prompt_logprobs[1:], some.prompt_logprobs[1:], strict=True):
        assert everything is not None
        assert few is not None
        assert list(few) == list(dict.fromkeys([token, 9, 4]))
        assert all(value.logprob == pytest.approx(everything[i].logprob, abs=1e-5) for i, value in few.items())


def test_flat_logprobs_read_like_the_others(llm: LLM) -> None:
    asked: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2}
    (plain,) = llm.generate(PROMPT, params(**asked), use_tqdm=False)
    (flat,) = llm.generate(PROMPT, params(**asked, flat_logprobs=True), use_tqdm=False)
    for expected, got in (
        (plain.outputs[0].logprobs, flat.outputs[0].logprobs),
        (plain.prompt_logprobs, flat.prompt_logprobs),
    ):
        assert isinstance(got, FlatLogprobs)
        assert expected is not None
        assert [entry or None for entry in got] == list(expected)
        assert list(got[1:3]) == list(expected[1:3])
        assert len(got.logprobs) == got.end_indices[-1] == sum(len(entry or {}) for entry in expected)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_modes(tiny_model: str, llm: LLM, mode: str) -> None:
    sampling: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "seed": 5, "logit_bias": {9: 4.0}}
    asked: dict[str, Any] = {**sampling, "logprobs": 6, "prompt_logprobs": 2}
    (raw,) = llm.generate(PROMPT, params(**asked), use_tqdm=False)
    with LLM(tiny_model, **OPTIONS, logprobs_mode=mode) as other:
        (got,) = other.generate(PROMPT, params(**asked), use_tqdm=False)
    assert raw.outputs[0].token_ids == got.outputs[0].token_ids
    for token, before, after in zip(
        got.outputs[0].token_ids, raw.outputs[0].logprobs or [], got.outputs[0].logprobs or [], strict=True
    ):
        values = [lp.logprob for lp in list(after.values())]
        if mode == "raw_logits":  # differ from logprobs by one number
            assert {before[i].rank for i in before} == {after[i].rank for i in after}
            assert np.ptp([after[i].logprob - before[i].logprob for i in before]) < 1e-4
        else:
            kept = [value for value in set(values) if value > -9999]
            assert 1 <= len(kept) <= 3
            assert after[token].logprob > -9999
        if mode == "processed_logprobs":
            assert np.exp(kept).sum() == pytest.approx(1, abs=1e-5)


def delta_sizes(outputs: list[RequestOutput]) -> list[int]:
    return [len(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("server", "asked", "interval"), [(1, None, 1), (1, 5, 5), (4, 2, 4), (3, None, 3), (1, 99, 99)]
)
def test_stream_interval(tiny_model: str, server: int, asked: int | None, interval: int) -> None:
    engine = LLMEngine(make_config(tiny_model, stream_interval=server))
    try:
        found: dict[RequestOutputKind, list[RequestOutput]] = {}
        for kind in RequestOutputKind:
            engine.add_request(PROMPT, params(output_kind=kind, stream_interval=asked, logprobs=1, max_tokens=24))
            found[kind] = []
            while engine.has_unfinished():
                found[kind] += engine.step()
            engine.drain()
    finally:
        engine.shutdown()
    deltas, whole = found[RequestOutputKind.DELTA], found[RequestOutputKind.FINAL_ONLY][-1].outputs[0]
    sizes = delta_sizes(deltas)
    assert sizes[0] == 1
    assert sum(sizes) == 24
    assert all(size == interval for size in sizes[1:-1])
    assert "".join(output.outputs[0].text for output in deltas) == whole.text
    assert [entry for output in deltas for entry in output.outputs[0].logprobs or []] == whole.logprobs
    lengths = delta_sizes(found[RequestOutputKind.CUMULATIVE])
    assert lengths[-1] == 24
    assert all(later - earlier == interval for earlier, later in pairwise(lengths[:-1]))


def test_a_request_may_leave_the_prefix_cache_unread(llm: LLM) -> None:
    prompt = list(range(2, 80))
    llm.generate([prompt], params(), use_tqdm=False)
    (cached,) = llm.generate([prompt], params(), use_tqdm=False)
    (fresh,) = llm.generate([prompt], params(skip_reading_prefix_cache=True), use_tqdm=False)
    assert (cached.num_cached_tokens, fresh.num_cached_tokens) == (64, 0)
    assert cached.outputs[0].token_ids == fresh.outputs[0].token_ids
    (scored,) = llm.generate([prompt], params(prompt_logprobs=0, prompt_logprob_start=40), use_tqdm=False)
    assert scored.num_cached_tokens == 32  # the blocks before the first scored position


def test_words_without_effect_are_taken(llm: LLM) -> None:
    plain = one(llm)
    assert one(llm, extra_args={"a": [1, "b"]}, spaces_between_special_tokens=False) == plain
    assert one(llm, repetition_detection={"max_pattern_size": 0}) == plain


def test_no_thinking_budget_without_thinking_tokens(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="thinking_token_budget"):
        one(llm, thinking_token_budget=5)


def test_thinking_is_closed_when_its_budget_is_spent(llm: LLM) -> None:
    free = one(llm, max_tokens=12, ignore_eos=True).token_ids
    end = next(i for i in range(VOCAB) if i not in free)
    tags = ThinkingTokens(start=None, end=end)
    held = one(llm, max_tokens=12, ignore_eos=True, thinking_token_budget=5, thinking=tags).token_ids
    assert held[:6] == [*free[:5], end]
    assert end not in held[6:]
    unopened = ThinkingTokens(start=end, end=free[0])
    assert one(llm, max_tokens=12, ignore_eos=True, thinking_token_budget=5, thinking=unopened).token_ids == free
    with pytest.raises(ValidationError, match="thinking"):
        one(llm, thinking_token_budget=5, thinking=ThinkingTokens(start=None, end=VOCAB))


def test_words_are_banned_as_they_begin_and_as_they_follow_a_space(tiny_model: str) -> None:
    info = EngineInfo(max_model_len=64, vocab_size=VOCAB, num_blocks=17, block_size=16, kv_cache_bytes=1)
    tokenizer = load_tokenizer(tiny_model)
    request = InputProcessor(tokenizer, info, make_config(tiny_model)).process(
        "x", SamplingParams(bad_words=["fox", " fox", "the lazy", " ", "\n"])
    )
    texts = [tokenizer.decode(ids) for ids in request.output.bad_words_token_ids]
    assert texts == ["fox", " fox", "the lazy", " the lazy", " ", "\n", " \n"]


FEATURES: dict[str, dict[str, Any]] = {
    "bad_words": {"bad_words": ["the", "a b", "e "], "temperature": 1.0, "seed": 1},
    "logit_bias": {"logit_bias": {9: 5.0, 30: -100}, "temperature": 0.7, "seed": 2},
    "allowed_token_ids": {"allowed_token_ids": list(range(20, 60)), "temperature": 1.0, "seed": 3},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(2, 200)), "ignore_eos": False, "max_tokens": 30},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.0, "seed": 4},
    "repetition": {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "allowed_token_ids": [30, 31, 32]},
    "logprobs": {"logprobs": 4, "prompt_logprobs": 2},
    "logprob_token_ids": {"logprob_token_ids": [4, 9], "prompt_logprob_token_ids": [7], "prompt_logprob_start": 21},
    "n": {"n": 3, "temperature": 1.0, "seed": 5},
    "all": {
        "bad_words": ["t"],
        "logit_bias": {40: 3.0},
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 5,
        "top_p": 0.9,
        "temperature": 1.0,
        "seed": 6,
        "logprobs": 1,
        "n": 2,
    },
}


def finals(engine: LLMEngine, prompts: list[list[int]], asked: list[SamplingParams]) -> list[RequestOutput]:
    ids = [engine.add_request(prompt, one).request_id for prompt, one in zip(prompts, asked, strict=True)]
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step()}
    engine.drain()
    engine.check_invariants()
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_tokens": 192},
        {"kv_tokens": 192, "pipeline_depth": 2},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
    ],
    ids=["preempted", "preempted in a pipeline", "chunked", "tiny chunks uncached"],
)
def test_no_field_depends_on_company(tiny_model: str, changes: dict[str, Any]) -> None:
    """Preempted and resubmitted, cut into chunks, beside all the others: the same tokens, logprobs and ends."""
    prompts = [[(5 * i + 3 * at) % 300 + 2 for i in range(28 + at)] for at in range(len(FEATURES))]
    asked = [
        params(**({"max_tokens": 40} | fields), output_kind=RequestOutputKind.FINAL_ONLY)
        for fields in FEATURES.values()
    ]
    roomy, other = LLMEngine(make_config(tiny_model)), LLMEngine(make_config(tiny_model, **changes))
    try:
        alone = [finals(roomy, [prompt], [one])[0] for prompt, one in zip(prompts, asked, strict=True)]
        crowd = finals(other, prompts, asked)
    finally:
        roomy.shutdown()
        other.shutdown()
    for name, expected, got in zip(FEATURES, alone, crowd, strict=True):
        assert got.outputs == expected.outputs, name
        assert got.prompt_logprobs == expected.prompt_logprobs, name
    if "kv_tokens" in changes:
        assert sum(output.metrics.num_preemptions for output in crowd if output.metrics) > 3
