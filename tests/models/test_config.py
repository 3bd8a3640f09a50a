"""Reading configs: whatever is in the file, the answer is a program or a ModelError, at once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.exceptions import FormatError, ModelError
from octavo.models.parts import read_rope
from octavo.models.registry import find_family

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "sliding_window_pattern": 6,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 8,
    "use_sliding_window": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
}
ROPE_KEYS = [
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "partial_rotary_factor", "factors"),
]
NUMBERS = st.one_of(
    st.integers(-3, 40), st.integers(), st.just(10**400), st.floats(), st.floats(0.5, 100), st.sampled_from([0, 0.0])
)
JSON = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=5), st.lists(NUMBERS, max_size=4), st.just({}))
ROPE = st.builds(
    lambda kind, rest: {"rope_type": kind} | rest,
    st.one_of(st.sampled_from(["default", "linear", "llama3", "yarn", "frequency_factors"]), JSON),
    st.dictionaries(st.sampled_from(ROPE_KEYS), JSON),
)


def build(config: dict[str, Any]) -> None:
    _, family = find_family(config, "config.json")
    parsed = family.config(config)
    if parsed.num_layers <= 50:
        family.build(parsed)


@given(
    architecture=st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"]),
    changes=st.dictionaries(st.sampled_from([key for key in BASE if key != "rope_scaling"]), JSON, max_size=3),
    rope=st.one_of(JSON, ROPE),
)
def test_any_value_is_read_or_refused(architecture: str, changes: dict[str, Any], rope: Any) -> None:
    with contextlib.suppress(ModelError):
        build(BASE | {"architectures": [architecture], "rope_scaling": rope} | changes)


def test_base_is_valid_and_missing_sizes_are_not() -> None:
    build(BASE)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        with pytest.raises(FormatError, match=key):
            build({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": 1e-320},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "frequency_factors", "factors": [1.0, 2.0, 0.0, 1.0]},
        {"rope_type": "frequency_factors", "factors": [1.0, "2", 1.0, 1.0]},
        {"rope_type": "frequency_factors", "factors": [1.0]},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.0},
        {"rope_type": ["yarn"]},
        {"rope_theta": 10**400},
    ],
)
def test_rope_that_cannot_be(rope: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="key"):
        build(BASE | {"rope_scaling": rope})


def test_transformers_4_and_5_write_rope_differently() -> None:
    linear = {"type": "linear", "factor": 2.0}
    old = read_rope({"rope_theta": 5e5, "rope_scaling": linear}, 8, 64)
    new = read_rope({"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 500000}}, 8, 64)
    assert old == new
    assert old.inv_freq == pytest.approx([0.5 * 5e5 ** (-j / 4) for j in range(4)])
