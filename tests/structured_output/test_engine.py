"""From params to text: a random model at temperature 1 can say only what its constraint allows."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.config import SpeculativeConfig
from octavo.core.request import Request
from octavo.engine.llm_engine import LLMEngine
from octavo.exceptions import ValidationError
from octavo.messages import FinishReason, StructuredOutputsParams
from tests.engine.tiny_llama import VOCAB
from tests.structured_output.languages import misjudged_by
from tests.structured_output.running import run, sampling

Params = StructuredOutputsParams
slow = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

NAMES = st.text("abcdéß ", min_size=1, max_size=3)
LEAVES = st.one_of(
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-99, 99), st.integers(0, 50)
    ),
    st.builds(
        lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n}, st.integers(0, 3), st.integers(0, 4)
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.sampled_from([1, "a", "ab", None, True, 2.5, [], {"k": 1}]), min_size=1, max_size=4, unique_by=repr
        ),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 'ü\n"x'}, {"type": "string", "format": "date"}]),
)


def _object(properties: dict[str, Any], required: list[bool], extra: bool) -> dict[str, Any]:
    names = [name for name, needed in zip(properties, [*required, *[True] * len(properties)], strict=False) if needed]
    closed = {} if extra else {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": names, **closed}


def _array(items: dict[str, Any], low: int, more: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + more}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            _object, st.dictionaries(NAMES, inner, max_size=3), st.lists(st.booleans(), max_size=3), st.booleans()
        ),
        st.builds(_array, inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@slow
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@example(schema={"type": "object", "properties": {"a": {"type": "string", "maxLength": 1}}}, seed=1)
def test_whatever_a_random_model_says_validates(engine: LLMEngine, schema: dict[str, Any], seed: int) -> None:
    (output,) = run(engine, sampling(Params(json=schema), seed=seed, max_tokens=200))
    if output.finish_reason == FinishReason.LENGTH:
        assert output.text.lstrip()[:1] in '"{[-0123456789tfn'  # a beginning
        return
    assert output.finish_reason == FinishReason.STOP
    jsonschema.validate(json.loads(output.text), schema)


PIECES = st.recursive(
    st.sampled_from(["a", "bc", "[a-z]", "[^a]", "[0-9]", "é", r"\.", "/", "[A-Z_]", " "]),
    lambda inner: st.one_of(
        st.builds("({}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
        st.builds(lambda piece, how: f"({piece}){how}", inner, st.sampled_from(["?", "*", "+", "{2}", "{0,3}"])),
    ),
    max_leaves=6,
)


@slow
@given(regex=PIECES, seed=st.integers(0, 2**32))
def test_whatever_a_random_model_says_matches_the_regex(engine: LLMEngine, regex: str, seed: int) -> None:
    (output,) = run(engine, sampling(Params(regex=regex), seed=seed, max_tokens=80))
    if output.finish_reason == FinishReason.STOP:
        assert re.fullmatch(regex, output.text, re.DOTALL), output.text
    else:
        assert output.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Params(choice=["yes", "no", "yesterday"]), "yes|no|yesterday"),
        (Params(grammar='root ::= ("a" | "b"){3} "!"'), "[ab]{3}!"),
        (Params(grammar='start: "(" ("x" | "y") ")"'), r"\([xy]\)"),
        (Params(json_object=True, disable_any_whitespace=True), r"\{.*\}"),
        (Params(structural_tag={"type": "structural_tag", "format": {"type": "regex", "pattern": "u{2}"}}), "uu"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind(engine: LLMEngine, constraint: Params, pattern: str, temperature: float) -> None:
    for output in run(engine, *(sampling(constraint, seed=s, temperature=temperature) for s in range(4))):
        if output.finish_reason == FinishReason.STOP:
            assert re.fullmatch(pattern, output.text, re.DOTALL), output.text
        else:
            assert constraint.kind == "json_object"


def test_special_tokens_never_spell_text(engine: LLMEngine) -> None:
    """A string may hold any character, yet not the token <|bos|>; the end is the only special one that comes."""
    params = [sampling(Params(regex="(?s:.*)"), seed=seed, skip_special_tokens=False) for seed in range(8)]
    special = set(engine.tokenizer.special_token_ids)
    for output in run(engine, *params):
        ends = output.token_ids[-1:] if output.finish_reason == FinishReason.STOP else []
        assert set(output.token_ids) & special <= set(ends)
        assert all(token_id < VOCAB for token_id in output.token_ids)


# ---- with other fields


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 50}, {"logit_bias": {1: -100.0}}])
def test_the_end_of_a_grammar_beats_what_would_go_on(engine: LLMEngine, fields: dict[str, Any]) -> None:
    (output,) = run(engine, sampling(Params(choice=["yes", "no"]), **fields))
    assert (output.text in ("yes", "no"), output.finish_reason, output.stop_reason) == (True, FinishReason.STOP, None)


def test_min_tokens_holds_where_the_grammar_can_go_on(engine: LLMEngine) -> None:
    (output,) = run(engine, sampling(Params(regex="a*"), min_tokens=20, max_tokens=40))
    assert len(output.token_ids) >= 20
    assert re.fullmatch("a+", output.text)


def test_allowed_token_ids_and_bad_words_narrow_the_grammar(engine: LLMEngine) -> None:
    encode = engine.tokenizer.encode
    (a,), (b,) = encode("a", add_special_tokens=False), encode("b", add_special_tokens=False)
    one, two, three = run(
        engine,
        sampling(Params(regex="[a-z]{5}"), allowed_token_ids=[a, b]),
        sampling(Params(regex="[ab]{5}"), bad_words=["a"]),
        sampling(Params(regex="[ab]{5}"), logit_bias={a: 100.0}),
    )
    assert re.fullmatch("[ab]{5}", one.text)
    assert two.text == "bbbbb"
    assert three.text == "aaaaa"


def test_nothing_left_ends_that_request_alone(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    (a,) = engine.tokenizer.encode("a", add_special_tokens=False)
    stuck, other = run(engine, sampling(Params(regex="b+"), allowed_token_ids=[a]), sampling(Params(regex="b{3}")))
    assert stuck.finish_reason == FinishReason.ERROR
    assert "no token is left" in str(stuck.stop_reason)
    assert stuck.fault is not None
    assert isinstance(stuck.fault.exception("x"), ValidationError)
    assert (other.text, other.finish_reason) == ("bbb", FinishReason.STOP)


def test_logprobs_are_finite_where_one_token_is_legal(engine: LLMEngine) -> None:
    (output,) = run(engine, sampling(Params(regex="bb"), logprobs=5))
    assert output.logprobs is not None
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token_id in entry
        assert all(-9999.0 <= value.logprob <= 0.0 for value in entry.values())


def test_stop_strings_and_length_end_it_too(engine: LLMEngine) -> None:
    stopped, cut = run(
        engine, sampling(Params(regex="(ab)+"), stop=["ba"]), sampling(Params(regex="(ab)+"), max_tokens=1)
    )
    assert (stopped.text, stopped.stop_reason) == ("a", "ba")
    assert cut.finish_reason == FinishReason.LENGTH


# ---- the same bits, whatever else happens

CONSTRAINTS = [
    Params(json={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}}),
    Params(regex="([a-z]{1,4} )*"),
    Params(grammar='root ::= "(" (root | [a-z])* ")"'),
    Params(json_object=True),
    None,
]


NGRAMS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3, disable_by_batch_size=64
)


def _bits(engine: LLMEngine, *params: Any, prompt: str) -> list[tuple[list[int], Any]]:
    return [(o.token_ids, o.finish_reason) for o in run(engine, *params, prompt=prompt)]


def test_alone_in_a_batch_preempted_and_in_chunks(
    engine: LLMEngine, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.tiny_llama import make_config

    prompt = "the quick brown fox jumps over the lazy dog " * 2
    params = [
        sampling(c, seed=s, max_tokens=90, temperature=t, repetition_penalty=1.1)
        for s, (c, t) in enumerate((c, t) for c in CONSTRAINTS for t in (0.0, 0.9))
    ]
    alone = [_bits(engine, one, prompt=prompt)[0] for one in params]
    assert _bits(engine, *params, prompt=prompt) == alone
    same = {"backend": "cpu", "threads": 1, "weights_cache": False}
    for changes in (
        {"kv_tokens": 128},  # few of them fit: preemptions
        {"max_num_batched_tokens": 16},
        {"pipeline_depth": 2, "kv_tokens": 160},
        {"threads": 2, "enable_prefix_caching": False},
        {"speculative_config": NGRAMS},
    ):
        other = LLMEngine(make_config(tiny_model, **{**same, **changes}))
        preempted = 0

        def count(victim: Request, original: Any = other._client._core._scheduler._book.preempt) -> None:
            nonlocal preempted
            preempted += victim.source.output.grammar is not None
            original(victim)

        monkeypatch.setattr(other._client._core._scheduler._book, "preempt", count)
        try:
            assert _bits(other, *params, prompt=prompt) == alone, changes
            assert (preempted > 0) == ("kv_tokens" in changes)
            other.check_invariants()
        finally:
            other.shutdown()


def test_the_reference_backend_says_what_the_native_one_says(engine: LLMEngine, tiny_model: str) -> None:
    from tests.engine.tiny_llama import make_config

    reference = LLMEngine(make_config(tiny_model))
    try:
        params = [sampling(c, temperature=0.0, max_tokens=12) for c in CONSTRAINTS if c is not None]
        for output, constraint in zip(run(reference, *params), CONSTRAINTS, strict=False):
            if output.finish_reason == FinishReason.STOP and constraint is not None:
                assert misjudged_by(constraint, [output.text], []) == []
    finally:
        reference.shutdown()


def test_samples_of_one_request_have_their_own_state(engine: LLMEngine) -> None:
    engine.add_request("one", sampling(Params(regex="[a-z]{6}"), n=4), request_id="n")
    outputs = []
    while engine.has_unfinished():
        outputs += [output for output in engine.step() if output.finished]
    texts = [completion.text for completion in outputs[-1].outputs]
    assert len(texts) == 4
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)


def test_a_bad_constraint_is_refused_before_admission(engine: LLMEngine) -> None:
    with pytest.raises(ValidationError, match="Invalid type: objekt"):
        engine.add_request("x", sampling(Params(json={"type": "objekt"})))
    assert not engine.has_unfinished()
