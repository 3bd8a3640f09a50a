"""Constraint and parser of each format agree: what a model is made to write is read as what was demanded.

The model is small and sampled hot, so whatever is right about its answers is the grammar's doing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.entrypoints.chat.chat_format import ChatFormat
from octavo.entrypoints.chat.constraints import answer_constraint
from octavo.entrypoints.chat.parsers.base import Chain, Parser
from octavo.entrypoints.chat.parsers.formats import reasoning_format, tool_format
from octavo.entrypoints.chat.prompts import ChatSetup
from octavo.entrypoints.chat.tools import ToolUse
from octavo.messages import StructuredOutputsParams
from tests.parsers.parsing import run

PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "coats"],
}
TOOLS = {"paint": PAINT, "now": {"type": "object", "properties": {}}}
FORMATS = [
    ("hermes", ""),
    ("qwen3_coder", ""),
    ("llama3_json", ""),
    ("mistral", "[TOOL_CALLS] ["),
    ("mistral", "[TOOL_CALLS]{{ name }}[ARGS]"),
    ("mistral", "[TOOL_CALLS]{{ name }}"),
]
CONTENT = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
CHOICE = StructuredOutputsParams(choice=["a (b)", "a (b) c"])
MANY = 6  # samples of each; a demanded answer that was cut off tells nothing


@dataclass(frozen=True)
class Trial:
    """One constraint, how to read what it made, and the texts that came of it."""

    setup: ChatSetup
    demanded: bool
    content: StructuredOutputsParams | None
    constraint: StructuredOutputsParams

    def parser(self) -> Parser:
        assert self.setup.format.tools is not None
        calls = self.setup.format.tools.parser(TOOLS)
        reasoning = self.setup.format.reasoning
        return calls if reasoning is None else Chain(reasoning.parser(False), calls)


def trial(
    name: str, text: str, *, named: bool = False, thinks: bool = False, content: StructuredOutputsParams | None = None
) -> Trial:
    schemas: dict[str, Any] = {"paint": PAINT} if named else TOOLS
    use = ToolUse((), schemas, demanded=content is None, named="paint" if named else None, strict=frozenset(TOOLS))
    reasoning = reasoning_format("qwen3") if thinks else None
    setup = ChatSetup(ChatFormat(tools=tool_format(name), reasoning=reasoning, text=text, takes_tools=True), use, {})
    constraint = answer_constraint(setup, content, parallel=False, thinking=False, raw=False)
    assert constraint is not None
    return Trial(setup, content is None, content, constraint)


TRIALS = [
    *(trial(name, text, named=named) for name, text in FORMATS for named in (False, True)),
    trial("hermes", "", thinks=True),
    trial("hermes", "", content=CONTENT),
    trial("mistral", "[TOOL_CALLS] [", content=CHOICE),
    trial("hermes", "", thinks=True, content=CHOICE),
]


@pytest.fixture(scope="module")
def texts(smollm2_path: str) -> list[list[str]]:
    """For each trial, the answers that ended by themselves."""
    with LLM(smollm2_path, max_model_len=256, kv_cache_memory="64MiB") as llm:
        params = [
            SamplingParams(temperature=1.5, seed=7, n=MANY, max_tokens=60, structured_outputs=one.constraint)
            for one in TRIALS
        ]
        outputs = llm.generate(["Paint the fence: "] * len(TRIALS), params, use_tqdm=False)
    return [[o.text for o in output.outputs if o.finish_reason == "stop"] for output in outputs]


@pytest.mark.parametrize("index", range(len(TRIALS)))
def test_what_was_demanded_is_read(texts: list[list[str]], index: int) -> None:
    one = TRIALS[index]
    assert len(texts[index]) >= MANY // 2
    for text in texts[index]:
        message = run(one.parser(), list(text))
        if one.demanded:
            assert (len(message["calls"]), message["content"]) == (1, ""), text
        for name, arguments in message["calls"]:
            assert name in one.setup.use.schemas
            value = json.loads(arguments)
            assert value.keys() == ({"colour", "coats"} if name == "paint" else set())
        if not message["calls"]:
            assert one.content is not None
            assert (
                json.loads(message["content"]) == {"a": 1}
                if one.content.json
                else message["content"].startswith("a (b)")
            )


@pytest.mark.parametrize(
    ("choice", "strict", "kind"),
    [("auto", (), None), ("auto", ("paint",), "triggered_tags"), ("required", (), "tags_with")],
)
def test_only_what_needs_it_is_constrained(choice: str, strict: tuple[str, ...], kind: str | None) -> None:
    use = ToolUse((), TOOLS, demanded=choice == "required", strict=frozenset(strict))
    setup = ChatSetup(ChatFormat(tools=tool_format("hermes"), takes_tools=True), use, {})
    found = answer_constraint(setup, None, parallel=True, thinking=False, raw=False)
    if kind is None:
        assert found is None
    else:
        assert found is not None
        assert isinstance(found.structural_tag, dict)
        assert found.structural_tag["format"]["type"].startswith(kind)


def test_what_was_asked_for_word_for_word_is_left_alone() -> None:
    use = ToolUse((), TOOLS, demanded=True)
    setup = ChatSetup(ChatFormat(tools=tool_format("hermes"), takes_tools=True), use, {})
    assert answer_constraint(setup, CHOICE, parallel=True, thinking=False, raw=True) is CHOICE
