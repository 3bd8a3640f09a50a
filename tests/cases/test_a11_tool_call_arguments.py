"""A11: a streamed tool call loses none of its arguments, not even those that are not there.

The model is made to write what the case needs by a constraint; everything else is the real road of a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.asking import answered, ask, events
from tests.cases.conftest import assert_whole
from tests.server.running_server import RunningServer, running_server

CHAT = "/v1/chat/completions"
TEMPLATE = Path(__file__).parents[1] / "server" / "chatml_tools.jinja"
NESTED = {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "array"}}}}
TOOLS = [
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "list": NESTED}},
        },
    },
]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Go."}], "tools": TOOLS, "temperature": 0}
HARD = {"text": 'a "}{" \\ </tool_call> é 日本 😀', "list": [{"k": [1, {"x": "]"}]}, {}]}


@pytest.fixture(scope="module")
def module_server(smollm2_path: str) -> Iterator[RunningServer]:
    flags = f"--served-model-name smollm2 --max-model-len 1024 --kv-cache-memory 64MiB --chat-template {TEMPLATE}"
    with running_server(smollm2_path, *flags.split()) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(module_server: RunningServer) -> Iterator[RunningServer]:
    yield module_server
    assert_whole(module_server)


def streamed(server: RunningServer, **fields: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """(content, calls, finish reason) of the chunks; an id and a name come once, with the first of a call."""
    content, calls, reason = "", [], None
    for chunk in events(server, CHAT, **{**ASK, **fields}):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content", "")
        for piece in choice["delta"].get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append([piece["function"]["name"], ""])
            calls[piece["index"]][1] += piece["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, [(name, arguments) for name, arguments in calls], reason


def whole(server: RunningServer, **fields: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    (choice,) = answered(ask(server, CHAT, **{**ASK, **fields}))["choices"]
    message = choice["message"]
    called = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message["content"] or "", called, choice["finish_reason"]


def call(name: str, arguments: Any, **dump: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments, **dump)}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ('<tool_call>{"name":"now","arguments":{}}</tool_call>', [("now", {})]),
        (call("note", HARD), [("note", HARD)]),
        (call("note", HARD, ensure_ascii=False, indent=1), [("note", HARD)]),
        (call("now", {}) + "\n" + call("note", HARD), [("now", {}), ("note", HARD)]),
    ],
)
def test_arguments_are_whole(server: RunningServer, text: str, called: list[tuple[str, Any]]) -> None:
    fields = {"structured_outputs": {"choice": [text]}, "max_tokens": 400}
    answer = streamed(server, **fields)
    assert answer == whole(server, **fields)
    assert answer[0] == ""
    assert [(name, json.loads(arguments)) for name, arguments in answer[1]] == called
    assert answer[2] == "tool_calls"


def test_a_call_that_is_none_stays_text(server: RunningServer) -> None:
    text = 'Look: <tool_call>{"name"} </tool_call>'
    fields = {"structured_outputs": {"choice": [text]}, "max_tokens": 60}
    assert streamed(server, **fields) == whole(server, **fields) == (text, [], "stop")


@pytest.mark.parametrize("seed", range(3))
def test_a_demanded_call_keeps_to_its_schema(server: RunningServer, seed: int) -> None:
    """The hottest sampling of a small model: only the grammar can make calls of that."""
    choices = ["red", "green"]
    paint = {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": choices},
                "coats": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["colour", "coats"],
            "additionalProperties": False,
        },
    }
    fields: dict[str, Any] = {
        "tools": [*TOOLS[:1], {"type": "function", "function": paint}],
        "temperature": 2.0,
        "seed": seed,
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    content, called, reason = streamed(server, **fields, tool_choice="required")
    assert (content, len(called), reason) == ("", 1, "tool_calls")
    assert whole(server, **fields, tool_choice="required") == (content, called, reason)
    named = {"type": "function", "function": {"name": "paint"}}
    content, ((name, arguments),), reason = streamed(server, **fields, tool_choice=named)
    assert (content, name, reason) == ("", "paint", "stop")
    assert json.loads(arguments).keys() == {"colour", "coats"}
    assert json.loads(arguments)["colour"] in choices
