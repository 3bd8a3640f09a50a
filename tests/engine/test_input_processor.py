"""What is refused before admission, with which parameter, and what is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.input_processor import InputProcessor, derive_seed
from octavo.exceptions import ValidationError
from octavo.messages import CacheOptions, EngineInfo, SamplingParams, SchedulingOptions
from octavo.tokenizer import load_tokenizer

from .tiny_llama import VOCAB, make_config


def info(**changes: Any) -> EngineInfo:
    facts = {"max_model_len": 64, "vocab_size": VOCAB, "num_blocks": 17, "block_size": 16, "kv_cache_bytes": 1}
    return EngineInfo(**(facts | changes))


@pytest.fixture
def processor(tiny_model: str) -> InputProcessor:
    return InputProcessor(load_tokenizer(tiny_model), info(), make_config(tiny_model))


def refusal(
    processor: InputProcessor, prompt: Any, params: SamplingParams | None = None, **kwargs: Any
) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        processor.process(prompt, params or SamplingParams(), **kwargs)
    return caught.value


def test_text_becomes_ids_and_gaps_are_filled(processor: InputProcessor, tiny_model: str) -> None:
    request = processor.process(
        "the fox",
        SamplingParams(max_tokens=None),
        scheduling=SchedulingOptions(priority=3),
        cache=CacheOptions(salt="s"),
    )
    tokenizer = load_tokenizer(tiny_model)
    assert request.prompt_token_ids == tokenizer.encode("the fox")
    assert request.sampling_params.max_tokens == 64 - len(request.prompt_token_ids)
    assert request.output.eos_token_ids == tokenizer.eos_token_ids != []
    assert (request.scheduling.priority, request.cache.salt) == (3, "s")


def test_internal_ids_never_repeat(processor: InputProcessor) -> None:
    ids = {processor.process([1], SamplingParams()).request_id for _ in range(100)}
    assert len(ids) == 100


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40])
def test_ids_outside_the_vocabulary(processor: InputProcessor, bad: int) -> None:
    error = refusal(processor, [1, bad, 2])
    assert error.parameter == "prompt"
    assert str(bad) in str(error)
    assert str(VOCAB - 1) in str(error)


@pytest.mark.parametrize("bad", [[1.5], [None], ["1"], [[1]]])
def test_ids_of_the_wrong_type(processor: InputProcessor, bad: list[Any]) -> None:
    assert refusal(processor, bad).parameter == "prompt"


def test_empty_prompt_is_bos_or_refused(processor: InputProcessor, tiny_model: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    for empty in ("", []):
        assert processor.process(empty, SamplingParams()).prompt_token_ids == [tokenizer.bos_token_id]
    tokenizer.bos_token_id = None
    bare = InputProcessor(tokenizer, info(), make_config(tiny_model))
    for empty in ("", []):
        assert refusal(bare, empty).parameter == "prompt"


@pytest.mark.parametrize(("prompt", "max_tokens"), [(8, 56), (63, 1), (63, None), (1, 63)])
def test_lengths_up_to_the_limit_pass(processor: InputProcessor, prompt: int, max_tokens: int | None) -> None:
    request = processor.process([1] * prompt, SamplingParams(max_tokens=max_tokens))
    assert request.sampling_params.max_tokens == (max_tokens or 64 - prompt)


def test_too_many_tokens_requested(processor: InputProcessor) -> None:
    error = refusal(processor, [1] * 8, SamplingParams(max_tokens=57))
    assert error.parameter == "max_tokens"
    for number in ("64 tokens", "65 were requested", "8 in the prompt", "57 for the output"):
        assert number in str(error)


@pytest.mark.parametrize("length", [64, 100])
def test_prompt_fills_the_context(processor: InputProcessor, length: int) -> None:
    error = refusal(processor, [1] * length, SamplingParams(max_tokens=None))
    assert error.parameter == "prompt"
    assert "64 tokens" in str(error)
    assert f"alone has {length} tokens" in str(error)


def test_prompt_longer_than_a_step_without_chunking(tiny_model: str) -> None:
    config = make_config(tiny_model, enable_chunked_prefill=False)
    processor = InputProcessor(load_tokenizer(tiny_model), info(max_model_len=4096), config)
    processor.process([1] * 128, SamplingParams())
    assert refusal(processor, [1] * 129).parameter == "prompt"


@pytest.mark.parametrize(
    ("parameter", "params"),
    [
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [VOCAB]}),
        ("min_tokens", {"max_tokens": None, "min_tokens": 64}),
    ],
)
def test_parameters_that_depend_on_the_model(processor: InputProcessor, parameter: str, params: dict[str, Any]) -> None:
    assert refusal(processor, [1], SamplingParams(**params)).parameter == parameter


@pytest.mark.parametrize("salt", ["", "x" * 1025])
def test_cache_salt_has_bounds(processor: InputProcessor, salt: str) -> None:
    assert refusal(processor, [1], cache=CacheOptions(salt=salt)).parameter == "cache_salt"


@pytest.mark.parametrize("priority", [2**31, -(2**31), 2**64, -(10**30)])
def test_priority_has_bounds(processor: InputProcessor, priority: int) -> None:
    assert refusal(processor, [1], scheduling=SchedulingOptions(priority=priority)).parameter == "priority"


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 2**63 - 1, 10**30])
def test_top_k_is_at_most_the_vocabulary(processor: InputProcessor, top_k: int) -> None:
    assert processor.process([1], SamplingParams(top_k=top_k)).sampling_params.top_k == VOCAB


def test_seeds(tiny_model: str) -> None:
    def seeds(config_seed: int) -> list[int | None]:
        processor = InputProcessor(load_tokenizer(tiny_model), info(), make_config(tiny_model, seed=config_seed))
        return [processor.process([1], SamplingParams()).sampling_params.seed for _ in range(50)]

    first = seeds(0)
    assert first == seeds(0)  # a fresh engine repeats itself
    assert len(set(first) | set(seeds(1))) == 100
    assert all(0 <= derive_seed(seed, 2**40) < 2**63 for seed in (0, -5, 2**63 - 1))
    processor = InputProcessor(load_tokenizer(tiny_model), info(), make_config(tiny_model))
    assert processor.process([1], SamplingParams(seed=42)).sampling_params.seed == 42
