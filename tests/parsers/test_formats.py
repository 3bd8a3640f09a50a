"""Texts as models write them, and what each says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.entrypoints.chat.parsers.base import Content, Reasoning, ToolCallDelta
from octavo.entrypoints.chat.parsers.formats import reasoning_parser_for, tool_format, tool_parser_for
from octavo.exceptions import ConfigError
from tests.parsers.parsing import PARSERS, TOOLS, run

HARD = {
    "q": 'a "quoted" {brace} \\ <tool_call> </tool_call>',
    "list": [{"a": [1, {"b": None}]}, "é😀日本"],
    "n": -1.5e3,
}
HARD_TEXT = json.dumps(HARD, ensure_ascii=False)


def xml(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


# parser, text -> content, calls with their arguments as values
CALLS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [("now", {})]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {HARD_TEXT}}}</tool_call>', "", [("f", HARD)]),
    ("hermes", f'<tool_call>{{"arguments": {HARD_TEXT}, "name": "f"}}</tool_call>', "", [("f", HARD)]),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {json.dumps(HARD_TEXT)}}}</tool_call>',
        "",
        [("f", HARD)],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"id": "x{", "name": "a", "arguments": {"k": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>\nDone.',
        "Let me see.\nDone.",
        [("a", {"k": 1}), ("b", {})],
    ),
    ("hermes", '<tool_call>{"name": "a"}\n{"name": "b"}</tool_call>', "", [("a", {}), ("b", {})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}', "", [("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_c', "", [("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "a"} oops</tool_call> more', "oops more", [("a", {})]),
    ("hermes", '<tool_call>{"name": "a", oops}</tool_call>', " oops}", [("a", {})]),
    ("hermes", 'x <tool_call>{"nam', 'x <tool_call>{"nam', []),
    ("hermes", "a <tool_call>no json</tool_call> b", "a <tool_call>no json</tool_call> b", []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
    ("hermes", '{"name": "now", "arguments": {}}', "", [("now", {})]),
    ("hermes", ' {"name": "now"}\n{"name": "get_weather", "arguments": {}}\n', "", [("now", {}), ("get_weather", {})]),
    ("hermes", '{{"name": "now", "arguments": {"a": 1}}}', "", [("now", {"a": 1})]),
    ("hermes", '\n<tool_call>{"name": "now"}</tool_call>\n', "", [("now", {})]),
    ("hermes", '{"name": "Ann"}', '{"name": "Ann"}', []),
    ("hermes", 'So:\n```json\n{\n  "name": "now",\n  "arguments": {}\n}\n```\n', "So:", [("now", {})]),
    ("hermes", '```\n{"name": "now"}\n```\nSo.', "\nSo.", [("now", {})]),
    ("hermes", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    ("hermes", "x\n```python\nd = {}\n```", "x\n```python\nd = {}\n```", []),
    ("hermes", '<tools>\n{"name": "now", "arguments": {}}\n</tools>', "", [("now", {})]),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Nîmes"}}',
        "",
        [("get_weather", {"city": "Nîmes"})],
    ),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama3_json", '{"name": "now"}; {"name": "now", "arguments": {}}', "", [("now", {}), ("now", {})]),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", "Hi {there}", "Hi {there}", []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "", [("now", {})]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {HARD_TEXT}, "id": "123456789"}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("f", HARD), ("now", {})],
    ),
    ("mistral", f"Sure.[TOOL_CALLS]f[ARGS]{HARD_TEXT}[TOOL_CALLS]now[ARGS]{{}}", "Sure.", [("f", HARD), ("now", {})]),
    ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}", "", [("f", {}), ("g", {})]),
    ("mistral", "[TOOL_CALLS]what is this", "[TOOL_CALLS]what is this", []),
    ("qwen3_coder", xml("now"), "", [("now", {})]),
    (
        "qwen3_coder",
        "I look.\n" + xml("get_weather", city='Pa"ris\n<b>', days="3", where='{"lat": [1]}'),
        "I look.",
        [("get_weather", {"city": 'Pa"ris\n<b>', "days": 3, "where": {"lat": [1]}})],
    ),
    ("qwen3_coder", xml("get_weather", city="12", days="many"), "", [("get_weather", {"city": "12", "days": "many"})]),
    ("qwen3_coder", xml("f", a="True", b="NaN", c="x"), "", [("f", {"a": True, "b": "NaN", "c": "x"})]),
    ("qwen3_coder", "<function=now></function> end", "end", [("now", {})]),
    ("qwen3_coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
    ("qwen3_coder", xml("now") + "\n" + xml("now"), "", [("now", {}), ("now", {})]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    message = run(PARSERS[name](), list(text))
    assert message["content"] == content
    assert [called for called, _ in message["calls"]] == [called for called, _ in calls]
    for (_, given), (_, wanted) in zip(message["calls"], calls):
        if given.count("{") == given.count("}"):
            assert json.loads(given) == wanted
        else:  # the text ended within the call
            assert not text.endswith("</tool_call>")


THOUGHTS = [
    ("qwen3", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    ("qwen3", "\n<think></think>Yes.", "", "Yes."),
    ("qwen3", "Yes, <think>no</think>", "", "Yes, <think>no</think>"),
    ("qwen3", "  plain", "", "  plain"),
    ("qwen3", "<think>endless", "endless", ""),
    ("qwen3", "<thin", "", "<thin"),
    ("qwen3, opened", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("qwen3, opened", "hm </thinking> hm", "hm </thinking> hm", ""),
    ("mistral thinking", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ("qwen3, opened", "hm </thi", "hm </thi", ""),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), THOUGHTS)
def test_thinking(name: str, text: str, reasoning: str, content: str) -> None:
    assert run(PARSERS[name](), list(text)) == {"content": content, "reasoning": reasoning, "calls": []}


def test_arguments_come_as_they_are_written() -> None:
    parser = tool_format("hermes").parser(TOOLS)
    text, call = parser.feed('Hm <tool_call>{"name": "now", "arg')
    assert text == Content("Hm")
    assert isinstance(call, ToolCallDelta)
    assert (call.index, call.name, call.arguments, len(call.id or "")) == (0, "now", "", 29)
    assert parser.feed('uments": {"a": "b') == [ToolCallDelta(0, '{"a": "b')]
    assert parser.feed("c") == [ToolCallDelta(0, "c")]
    assert parser.feed('"}}</tool_call>') == [ToolCallDelta(0, '"}')]
    assert parser.finish() == []


def test_thinking_streams_but_for_what_may_be_the_tag() -> None:
    parser = PARSERS["qwen3, opened"]()
    assert parser.feed("a b ") == [Reasoning("a b")]
    assert parser.feed("c<") == [Reasoning(" c")]
    assert parser.feed("/think>") == []
    assert parser.feed("\nd ") == [Content("d ")]


def test_mistrals_ids_have_nine_characters() -> None:
    delta = tool_format("mistral").parser({}).feed("[TOOL_CALLS]f[ARGS]{")[0]
    assert isinstance(delta, ToolCallDelta)
    assert len(delta.id or "") == 9


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=x>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_names_its_tool_parser(template: str, name: str | None) -> None:
    assert tool_parser_for(template) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [("<think>", "qwen3"), ("<｜Assistant｜><think>", "deepseek_r1"), ("[THINK]", "mistral"), ("x", None)],
)
def test_the_template_names_its_reasoning_parser(template: str, name: str | None) -> None:
    assert reasoning_parser_for(template) == name


def test_vllms_other_name_of_a_parser_is_known_and_told() -> None:
    assert tool_format("qwen3_xml") is tool_format("qwen3_coder")
    with pytest.raises(ConfigError, match=r"one of hermes, llama3_json, mistral, qwen3_coder, qwen3_xml$"):
        tool_format("qwen3")
