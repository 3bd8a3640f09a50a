"""The checker says what is wrong in time, whatever it is given, and stays of use."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from octavo.exceptions import ConfigError, RequestError, ValidationError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.check_process import try_out
from octavo.structured_output.checker import GrammarChecker
from octavo.structured_output.compiler import compile_grammar
from octavo.structured_output.translate import OPTIONS, translate
from octavo.structured_output.vocabulary import byte_vocabulary
from octavo.tokenizer import load_tokenizer
from tests.engine.tiny_llama import VOCAB, make_config

Params = StructuredOutputsParams
GOOD = Params(regex="[ab]+")


def chain(length: int) -> dict[str, Any]:
    """Schemas that refer to one another in a row: the compiler recurses as deep."""
    names = {f"n{i}": {"properties": {"a": {"$ref": f"#/$defs/n{i + 1}"}}} for i in range(length)}
    return {"$defs": {**names, f"n{length}": {"type": "integer"}}, "$ref": "#/$defs/n0"}


SLOW = Params(json={"type": "integer", "multipleOf": 999_983})  # seconds of work that nothing counts


def quick(model: str, **fields: Any) -> GrammarChecker:
    config = make_config(model, **fields).structured_outputs
    return GrammarChecker(config, load_tokenizer(model), VOCAB)


def ambiguous(rules: int) -> str:
    """Every text has more readings the longer it is, and each step looks at all of them."""
    options = " | ".join(f"/[a-z ]/ r{i}" for i in range(rules))
    return f"start: s\ns: {options}\n" + "".join(f'r{i}: s "{chr(97 + i % 26)}"?\n' for i in range(rules))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (Params(grammar=ambiguous(300)), "every token takes too much work"),
        (Params(json={"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}), "too much work"),
        (Params(regex="("), "unclosed group"),
        (Params(regex="(?=a)b"), "look-around"),
        (Params(json={"type": "objekt"}), "Invalid type: objekt"),
        (Params(json={"$ref": "#/$defs/nope"}), "does not exist"),
        (Params(json={"$ref": "https://example.com/schema.json"}), "not present"),
        (Params(json={"uniqueItems": True, "type": "array"}), "uniqueItems"),
        (Params(json={"type": "object", "required": ["a"], "properties": {"a": False}}), "unsatisfiable"),
        (Params(json={"$ref": "#"}), "no text can satisfy it"),
        (Params(grammar='start: "a"\nstart: "b"'), "line 2: duplicate rule"),
        (Params(grammar="start: <|no_such_token|>"), "unknown special token"),
        (Params(grammar='root ::= "a"\nroot ::= "b"'), "line 2: rule 'root' is defined twice"),
        (Params(json=chain(1500)), "nests too deeply"),
        (Params(grammar="start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"'), "big"),
    ],
)
def test_nonsense_is_refused_in_words(checker: GrammarChecker, params: Params, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        checker.check(params)
    assert caught.value.parameter == f"structured_outputs.{params.kind}"
    assert "panic" not in str(caught.value)
    assert OPTIONS.strip() in checker.check(GOOD).encode().decode("unicode_escape")


def test_the_time_is_bounded(tiny_model: str) -> None:
    checker = quick(tiny_model, grammar_timeout=0.3)
    try:
        checker.check(GOOD)
        for _ in range(2):  # the second time at once
            with pytest.raises(ValidationError, match=r"more than 0\.3 s to compile"):
                checker.check(SLOW)
        assert checker.known(SLOW)
        checker.check(Params(regex="c"))
    finally:
        checker.close()


def test_the_size_is_bounded(tiny_model: str) -> None:
    checker = quick(tiny_model, max_grammar_bytes=1024)
    try:
        with pytest.raises(ValidationError, match=r"structured_outputs.regex has \d+ bytes; at most 1024"):
            checker.check(Params(regex="a" * 2000))
    finally:
        checker.close()
    with pytest.raises(ConfigError, match="grammar_timeout"):
        make_config(tiny_model, grammar_timeout=0.0)


def test_what_is_no_json_is_refused(checker: GrammarChecker) -> None:
    for value in ({1, 2}.__iter__(), 2**80, object(), b"a", {(1, 2): 3}):
        with pytest.raises(ValidationError, match=r"structured_outputs\.json"):
            checker.check(Params(json={"const": value}))


def test_an_answer_is_remembered(checker: GrammarChecker) -> None:
    assert not checker.known(GOOD)
    grammar = checker.check(GOOD)
    assert checker.known(GOOD)
    assert checker.check(Params(regex="[ab]+")) == grammar
    assert not checker.known(Params(regex="[ab]+", disable_any_whitespace=True))


def test_defaults_of_the_server_are_added(tiny_model: str) -> None:
    checker = quick(tiny_model, disable_any_whitespace=True, disable_additional_properties=True)
    try:
        grammar = checker.check(Params(json={"type": "object", "properties": {"a": {}}}))
        assert '\\"additionalProperties\\": false' in grammar
        assert '\\"whitespace_flexible\\": false' in grammar
    finally:
        checker.close()


def test_a_hostile_grammar_does_not_hold_up_others(tiny_model: str) -> None:
    checker = quick(tiny_model, grammar_timeout=30.0)
    failures: list[BaseException] = []

    def slow() -> None:
        try:
            checker.check(SLOW)
        except Exception as error:
            failures.append(error)

    checker.check(GOOD)
    thread = threading.Thread(target=slow)
    thread.start()
    try:
        time.sleep(0.2)
        assert checker.check(Params(regex="x")) != ""
        assert thread.is_alive()
    finally:
        checker.close()
        thread.join(30)
    assert not thread.is_alive()
    assert isinstance(failures[0], RequestError)
    with pytest.raises(RequestError, match="shut down"):
        checker.check(Params(regex="y"))


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    checker.check(GOOD)
    (process,) = checker._idle
    os.kill(process._process.pid, 9)
    with pytest.raises(ValidationError):
        checker.check(Params(regex="z"))
    assert checker.check(Params(regex="zz")) != ""


def test_nothing_is_left_behind(tiny_model: str) -> None:
    checker = quick(tiny_model)
    checker.check(GOOD)
    (process,) = checker._idle
    checker.close()
    assert process._process.returncode is not None
    checker.close()


def test_the_width_of_the_vocabulary_is_not_held_against_a_grammar() -> None:
    """Where a text may end, the mask has a bit far behind all others."""
    special = {"<|im_end|>": 151_645, "<tool_call>": 151_657}
    vocabulary = byte_vocabulary(special, [151_645], 151_936)
    for params in (Params(regex="(?s:.*)"), Params(grammar='start: (<tool_call> "a")+')):
        assert try_out(compile_grammar(vocabulary, translate(params, special))) is None
