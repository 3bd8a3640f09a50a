"""SamplingParams: convenient forms become plain ones, and what cannot travel to the core is refused here."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.config import SamplingConfig
from octavo.exceptions import ValidationError
from octavo.messages import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

REPEATED = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
A_REGEX = StructuredOutputsParams(regex="a")
LIMITS = SamplingConfig(max_n=4, max_bad_words=2, max_logprobs=3)
OBJECT_FIELDS = ("repetition_detection", "structured_outputs", "thinking", "beam_search")


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ("x", "y")}, {"stop": ["x", "y"]}),
        ({"stop": None}, {"stop": []}),
        ({"stop_token_ids": None}, {"stop_token_ids": []}),
        ({"stop_token_ids": (3,)}, {"stop_token_ids": [3]}),
        ({"logit_bias": {"5": 1}}, {"logit_bias": {5: 1}}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"top_p": np.float64(0.5)}, {"top_p": 0.5}),
        ({"max_tokens": np.int64(5)}, {"max_tokens": 5}),
        ({"seed": -1}, {"seed": None}),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        ({"bad_words": "x"}, {"bad_words": ["x"]}),
        ({"allowed_token_ids": range(2, 4)}, {"allowed_token_ids": [2, 3]}),
        ({"stop_token_ids": [np.int64(3)]}, {"stop_token_ids": [3]}),
        ({"logit_bias": {5: 1e9, np.int32(6): -1e300}}, {"logit_bias": {5: 100.0, 6: -100.0}}),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}, {"repetition_detection": REPEATED}),
        ({"structured_outputs": {"regex": "a", "json": None}}, {"structured_outputs": A_REGEX}),
    ],
)
def test_forms_that_mean_the_same(given: dict[str, Any], plain: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert params == SamplingParams(**plain)
    for name, value in plain.items():
        assert type(getattr(params, name)) is type(value)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert travelled == params


@pytest.mark.parametrize(
    "wrong",
    [
        {"ignore_eos": "no"},
        {"detokenize": 1},
        {"skip_special_tokens": None},
        {"include_stop_str_in_output": 0},
        {"output_kind": 1},
        {"stop": 5},
        {"stop": [5]},
        {"stop": [""]},
        {"stop_token_ids": ["5"]},
        {"stop_token_ids": 5},
        {"allowed_token_ids": ["a"]},
        {"allowed_token_ids": "a"},
        {"allowed_token_ids": []},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {5: "1"}},
        {"temperature": "1"},
        {"temperature": True},
        {"n": 1.5},
        {"seed": 2**63},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": float("nan")},
        {"temperature": 10**400},
        {"max_tokens": -(10**5000)},
        {"bad_words": [""]},
        {"bad_words": ["x" * 257]},
        {"logprobs": -2},
        {"logprob_token_ids": list(range(129))},
        {"logprobs": 3, "logprob_token_ids": [1, 2]},
        {"prompt_logprob_token_ids": []},
        {"prompt_logprob_token_ids": [1, 1]},
        {"prompt_logprob_start": -1},
        {"stream_interval": 0},
        {"thinking_token_budget": -2},
        {"thinking_token_budget": 1.0},
        {"skip_reading_prefix_cache": 1},
        {"extra_args": {1: 2}},
        {"extra_args": {"a": [2**70]}},
        *({name: 2**63} for name in ("max_tokens", "logprobs", "prompt_logprobs", "stream_interval")),
        *({name: 2**63} for name in ("prompt_logprob_start", "thinking_token_budget")),
        {"min_tokens": 2**63, "max_tokens": None},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 2**63}},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
        {"repetition_detection": {"max_pattern_size": 1025, "min_count": 2}},
        {"repetition_detection": {"size": 2}},
        {"repetition_detection": {"max_pattern_size": True, "min_count": 2}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regexp": "a"}},
        {"structured_outputs": {1: "a"}},
        *({name: value} for name in OBJECT_FIELDS for value in ("a", 1, True, [], LIMITS)),
    ],
)
def test_wrong_types_name_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**wrong)
    assert caught.value.parameter == next(iter(wrong))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("wrong", "limit"),
    [
        ({"n": 5}, "4, the server's --max-n"),
        ({"bad_words": ["a", "b", "c"]}, "2 words, the server's --max-bad-words"),
        ({"logprobs": 4}, "3, the server's --max-logprobs"),
        ({"logprobs": -1}, "3, the server's --max-logprobs"),
        ({"prompt_logprobs": -1}, "3, the server's --max-logprobs"),
        ({"prompt_logprob_token_ids": [1, 2, 3, 4]}, "3 ids, the server's --max-logprobs"),
        ({"logprob_token_ids": [9]}, "[0, 8]"),
        ({"allowed_token_ids": [*range(9), 9]}, "[0, 8]"),
        ({"logit_bias": {9: 1}}, "[0, 8]"),
    ],
)
def test_what_a_server_or_its_model_refuses(wrong: dict[str, Any], limit: str) -> None:
    params = SamplingParams(**wrong)
    with pytest.raises(ValidationError) as caught:
        params.verify(vocab_size=9, limits=LIMITS)
    assert caught.value.parameter == next(iter(wrong))
    assert limit in str(caught.value)


def test_what_they_allow() -> None:
    SamplingParams(n=4, bad_words=["a", "b"], logprobs=3).verify(vocab_size=9, limits=LIMITS)
    SamplingParams(logprob_token_ids=[1, 2, 3, 4], logprobs=4).verify(vocab_size=9, limits=LIMITS)
    everything = SamplingParams(logprobs=-1, prompt_logprobs=9)
    everything.verify(vocab_size=9, limits=SamplingConfig(max_logprobs=-1))


def test_a_copy_is_validated_too() -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert params.replace(max_tokens=np.int32(3)).max_tokens == 3
    with pytest.raises(ValidationError):
        params.replace(max_tokens=0)
