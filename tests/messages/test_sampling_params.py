"""SamplingParams: convenient forms become plain ones, and what cannot travel to the core is refused here."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.exceptions import ValidationError
from octavo.messages import RequestOutputKind, SamplingParams


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
    ],
)
def test_wrong_types_name_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**wrong)
    assert caught.value.parameter == next(iter(wrong))


def test_a_copy_is_validated_too() -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert params.replace(max_tokens=np.int32(3)).max_tokens == 3
    with pytest.raises(ValidationError):
        params.replace(max_tokens=0)
