"""Every kind of constraint becomes the language it stands for."""

from __future__ import annotations

import pytest

from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.structural_tag import Tag, tool_calls
from octavo.structured_output.translate import translate
from tests.structured_output.languages import SPECIAL, misjudged_by

Params = StructuredOutputsParams
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
NESTED = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
TAGS = [
    Tag('<tool_call>\n{"name": "get", "arguments": ', CITY, "}\n</tool_call>"),
    Tag('<tool_call>\n{"name": "get_n", "arguments": ', NUMBER, "}\n</tool_call>"),
]
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "x"}}\n</tool_call>'
CALL_N = '<tool_call>\n{"name": "get_n", "arguments": {"n": 4}}\n</tool_call>'


def formatted(**form: object) -> StructuredOutputsParams:
    return Params(structural_tag={"type": "structural_tag", "format": form})


def const(text: str) -> dict[str, str]:
    return {"type": "const_string", "value": text}


CASES = {
    "schema": (Params(json=CITY), ['{"city":"a"}', '{ "city" : "a" }'], ["{}", '{"city":1}', '{"city":"a","b":1}']),
    "schema as text": (Params(json='{"enum": [1, "x"]}'), ["1", '"x"'], ["2"]),
    "schema true": (Params(json=True), ["1", '{"a":[]}'], ["x"]),
    "no white space": (Params(json=CITY, disable_any_whitespace=True), ['{"city":"a"}'], ['{"city": "a"}']),
    "own white space": (Params(json=CITY, whitespace_pattern=" "), ['{"city": "a"}'], ['{"city":  "a"}']),
    "closed objects": (
        Params(json=NESTED, disable_additional_properties=True),
        ['{"a":{"b":1}}', "{}"],
        ['{"c":1}', '{"a":{"c":1}}'],
    ),
    "open objects": (Params(json=NESTED), ['{"c":1}', '{"a":{"c":1}}'], ['{"a":1}']),
    "json_object": (Params(json_object=True), ["{}", '{"a":[1]}'], ["[]", "1"]),
    "regex": (Params(regex="a/b\\/c\nd|[\\/]"), ["a/b/c\nd", "/"], ["a", "b/"]),
    "anchored regex": (Params(regex=r"^\d{3}-\d{4}$"), ["123-4567"], ["1", "x123-4567"]),
    "choice": (Params(choice=["foo", "foobar", 'a"b\\', "é\x7f"]), ["foo", "foobar", 'a"b\\', "é\x7f"], ["fo", "foob"]),
    "ebnf": (Params(grammar='root ::= "a" root? "b"'), ["ab", "aabb"], ["aab"]),
    "lark": (Params(grammar='start: "a" start? "b"'), ["ab", "aabb"], ["aab"]),
    "lark with a special token": (Params(grammar='start: "a" <|tool|> "b"'), ["a<|tool|>b"], ["ab"]),
    "required calls": (
        tool_calls(TAGS, required=True, separator="\n"),
        [CALL, CALL_N, CALL + "\n" + CALL_N],
        ["", CALL + CALL_N, "hi", CALL + "\n"],
    ),
    "one required call": (tool_calls(TAGS, required=True, parallel=False), [CALL, CALL_N], ["", CALL + CALL_N]),
    "calls as a list": (
        tool_calls([Tag('{"f": ', CITY, "}")], required=True, prefix="[", suffix="]", separator=", "),
        ['[{"f": {"city":"u"}}]', '[{"f": {"city":"u"}}, {"f": {"city":"v"}}]'],
        ["[]", '{"f": {"city":"u"}}'],
    ),
    "calls in text": (
        tool_calls(TAGS, required=False, triggers=["<tool_call>"]),
        ["hello < world", "", CALL, f"text {CALL} more {CALL_N} end"],
        ["text <tool_call>", "<tool_call>x", CALL + "<tool_call>"],
    ),
    "one call in text": (
        tool_calls(TAGS, required=False, parallel=False, triggers=["<tool_call>"]),
        ["hello", "x" + CALL],
        [CALL + CALL_N, CALL + "x"],
    ),
    "beginnings as triggers": (tool_calls(TAGS, required=False), ["hello <tool_call>", CALL + CALL_N], [CALL[:-3]]),
    "special tokens as marks": (
        tool_calls([Tag("<|tool|>call ", CITY, "<|end|>")], required=False),
        ["hi", 'hi <|tool|>call {"city":"x"}<|end|> and'],
        ["<|tool|>x", "<|end|>", '<|tool|>call {"city":"x"}'],
    ),
    "a beginning that begins another": (
        tool_calls([Tag("f", NUMBER), Tag("f2", CITY)], required=True, parallel=False),
        ['f{"n":1}', 'f2{"city":"x"}'],
        ['f2{"n":1}', 'f{"city":"x"}'],
    ),
    "the older form": (
        Params(structural_tag={"structures": [{"begin": "<f>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f"]}),
        ['a <f>{"n":3}</f> b', "x"],
        ["<f>", '<f>{"n":"a"}</f>'],
    ),
    "thought before an answer": (
        formatted(
            type="sequence",
            elements=[
                const("<think>"),
                {"type": "any_text"},
                const("</think>"),
                {"type": "json_schema", "json_schema": NUMBER},
            ],
        ),
        ['<think>hm < a</think>{"n":1}'],
        ['<think>{"n":1}', '{"n":1}'],
    ),
    "alternatives": (
        formatted(
            type="or",
            elements=[
                {"type": "regex", "pattern": "[0-9]+"},
                {"type": "grammar", "grammar": 'root ::= "(" root? ")"'},
                {"type": "tag", "begin": "<x>", "content": {"type": "any_text"}, "end": ["</x>", "</y>"]},
            ],
        ),
        ["12", "(())", "<x>u</y>", "<x></x>"],
        ["x", "(", "<x>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_language_is_what_was_asked_for(name: str) -> None:
    params, good, bad = CASES[name]
    assert misjudged_by(params, good, bad) == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (Params(json="{nope"), "structured_outputs.json: not valid JSON"),
        (Params(json="[1]"), "a JSON schema is an object or a boolean, got list"),
        (Params(grammar="root ::= nope"), "structured_outputs.grammar: rule 'root' uses 'nope'"),
        (Params(structural_tag="[]"), "structured_outputs.structural_tag: must be an object"),
        (Params(structural_tag={}), "needs 'format'"),
        (formatted(type="song"), "format.type: 'song' is not a kind"),
        (formatted(type="sequence", elements=3), "format.elements: must be a list"),
        (formatted(type="or", elements=[]), "format.elements: must not be empty"),
        (formatted(type="const_string"), "format.value: must be a string"),
        (formatted(type="tags_with_separator", tags=[]), "format.tags: must not be empty"),
        (formatted(type="tag", begin="a", content={"type": "any_text"}, end=3), "format.end: must be a string"),
        (
            formatted(type="triggered_tags", triggers=["x"], tags=[Tag("y", True).format()]),
            "'y' begins with none of the triggers",
        ),
        (
            formatted(type="sequence", elements=[{"type": "any_text"}, {"type": "regex", "pattern": "a"}]),
            "any_text must be last",
        ),
    ],
)
def test_the_field_at_fault_is_named(params: StructuredOutputsParams, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        translate(params, SPECIAL)
    assert caught.value.parameter == f"structured_outputs.{params.kind}"


def test_nesting_is_bounded() -> None:
    form: dict[str, object] = {"type": "any_text"}
    for _ in range(400):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(ValidationError, match="inside one another"):
        translate(formatted(**form), SPECIAL)
    schema: dict[str, object] = {}
    for _ in range(400):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ValidationError, match="nested too deeply"):
        translate(Params(json=schema, disable_additional_properties=True), SPECIAL)
