"""Where text is cut must not matter, and nothing that a model writes may raise or vanish."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.entrypoints.chat.parsers.base import Chain
from tests.parsers.parsing import PARSERS, joined, pieces, run

PIECES = [
    *("<tool_call>", "</tool_call>", "<function=get_weather>", "</function>", "<parameter=city>", "</parameter>"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "[/THINK]",
        "<think>",
        "</think>",
        "<parameter=days>",
        "<function=",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
        "\\u00e9",
        "\n",
        "  ",
        ";",
        "null",
        "12",
        "é",
        "日本",
        "😀",
        "get_weather",
    ),
    *('{"name": "now", "arguments": {}}', '{"name": "get_weather", "arguments": {"city": "Par}is"}}', '"name"'),
    *(
        '{"arguments": {"a": [1, {"b": "c"}]}, "name": "now"}',
        '"arguments"',
        '"parameters": ',
        "hello",
        "<",
        "</",
        "a",
        "```",
        "json",
    ),
    *('{"name": "get_weather", "parameters": "{\\"days\\": 3}"}', '{"name": "now"', '{"name": "f", "x": ', "<tool"),
]
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join),
)
cuts = st.lists(st.integers(0, 200), max_size=12)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=400, deadline=None)
@given(text=texts, cuts=cuts)
@example(text='<tool_call>{"name": "now", "arguments": {"a": "\\', cuts=[45, 46])
def test_cuts_do_not_matter(name: str, text: str, cuts: list[int]) -> None:
    whole = run(PARSERS[name](), [text])
    assert run(PARSERS[name](), pieces(text, cuts)) == whole
    assert run(PARSERS[name](), list(text)) == whole


@settings(max_examples=300, deadline=None)
@given(text=texts, cuts=cuts)
def test_cuts_do_not_matter_for_thinking_with_calls(text: str, cuts: list[int]) -> None:
    whole = run(Chain(PARSERS["qwen3"](), PARSERS["hermes"]()), [text])
    assert run(Chain(PARSERS["qwen3"](), PARSERS["hermes"]()), pieces(text, cuts)) == whole


def letters(text: str) -> list[str]:
    return re.findall(r"[G-Z]", text)


words = st.text("GHJKLMNOPQRSTUVWXYZ ", min_size=1, max_size=5)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=400, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(PIECES), words), max_size=12))
def test_words_outside_of_calls_survive(name: str, parts: list[str]) -> None:
    """Capital letters beyond F are in no tag of these pieces: each comes out as content, thinking or arguments, in
    order, unless the text ended within a call that had begun."""
    text = "".join(part for part in parts if part not in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[/THINK]", "😀"))
    message = run(PARSERS[name](), [text])
    told = sorted(letters(message["reasoning"] + message["content"] + "".join(map(str, message["calls"]))))
    if not message["calls"]:
        assert told == sorted(letters(text))
        if name.startswith(("hermes", "mistral", "qwen3_coder", "llama")):
            assert message["content"] == text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "qwen3_coder"])
@given(text=st.text())
def test_plain_text_is_untouched(name: str, text: str) -> None:
    if not any(mark in text for mark in ("<", "[", "{")):
        assert run(PARSERS[name](), list(text)) == {"content": text, "reasoning": "", "calls": []}


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("shape", ["{}", "a{}b", "a{}" + CALL, CALL + "{}", CALL + "{}" + CALL, "<think>{}</think>{}a"])
def test_very_much_white_space_is_not_held_back(name: str, shape: str) -> None:
    """What is held back is looked at again with every token: a model that writes newlines for ever must not cost ever
    more."""
    text = shape.replace("{}", "\n \t" * 1000)
    assert run(PARSERS[name](), list(text)) == run(PARSERS[name](), [text])
    parser = PARSERS[name]()
    begun = joined([delta for piece in "a" + "\n" * 3000 for delta in parser.feed(piece)])
    said = begun["content"] + begun["reasoning"]
    assert len(said) > 1500
