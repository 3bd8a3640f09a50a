"""Whatever a model says, thinks and calls, however it is cut: the events tell the same story as the whole answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.entrypoints.api.messages.answers import MessageBuilder
from octavo.entrypoints.api.responses.answers import ResponseBuilder
from octavo.entrypoints.chat.conversation import ChatEvent
from octavo.entrypoints.chat.generation import UsageCounter
from octavo.entrypoints.chat.parsers.base import Content, Delta, Reasoning, ToolCallDelta
from octavo.messages import CacheOptions, RequestFacts

ECHO = {
    **{"instructions": None, "max_output_tokens": None, "parallel_tool_calls": True, "reasoning": {}, "user": None},
    **{"temperature": 1.0, "top_p": 1.0, "text": {}, "tool_choice": "auto", "tools": [], "top_logprobs": 0},
    "metadata": {},
}


@dataclass
class Talk:
    """What a builder asks of a conversation."""

    id: str = "x"
    model: str = "m"
    created: int = 1
    reply: Any = None
    tokenizer: Any = None
    cache: CacheOptions = CacheOptions()
    counter: UsageCounter = field(default_factory=lambda: UsageCounter([7], 5, {0: RequestFacts(num_cached_tokens=3)}))

    @property
    def generation(self) -> Talk:
        return self


TEXT = st.text(min_size=1, max_size=4)
CALL = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(
    lambda keys: json.dumps({key: number for number, key in enumerate(keys)})
)


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[list[Delta]]]:
    """(what comes: kind and text, in order; its deltas, cut into steps)."""
    story = draw(st.lists(st.tuples(st.sampled_from(["content", "reasoning", "call"]), TEXT | CALL), max_size=6))
    story = [(kind, text if kind != "call" else draw(CALL)) for kind, text in story]
    deltas: list[Delta] = []
    calls = 0
    for kind, text in story:
        cut = draw(st.integers(0, len(text)))
        if kind == "call":
            deltas.append(ToolCallDelta(calls, text[:cut], id=f"call_{calls}", name="f"))
            deltas.append(ToolCallDelta(calls, text[cut:]))
            calls += 1
        else:
            make = Content if kind == "content" else Reasoning
            deltas += [make(piece) for piece in (text[:cut], text[cut:]) if piece]
    steps: list[list[Delta]] = [[]]
    for delta in deltas:
        if draw(st.booleans()):
            steps.append([])
        steps[-1].append(delta)
    merged = []
    for kind, run in groupby(story, key=lambda entry: entry[0]):
        texts = [text for _, text in run]
        merged += [(kind, text) for text in texts] if kind == "call" else [(kind, "".join(texts))]
    return merged or [("content", "")], steps


def news(steps: list[list[Delta]], reason: str) -> list[ChatEvent]:
    last = len(steps) - 1
    return [ChatEvent(0, d, [1], None, reason if i == last else None, None) for i, d in enumerate(steps)]


def plain(event: Any) -> Any:
    return json.loads(msgspec.json.encode(event))


@given(stories(), st.sampled_from(["stop", "length", "tool_calls", "abort"]))
def test_a_response(story: tuple[list[tuple[str, str]], list[list[Delta]]], reason: str) -> None:
    expected, steps = story
    builder = ResponseBuilder(Talk(), ECHO)  # type: ignore[arg-type]
    events = [plain(event) for event in builder.start()]
    for one in news(steps, reason):
        events += [plain(event) for event in builder.feed(one)]
    events += [plain(event) for event in builder.finish()]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
    assert (final["status"], events[-1]["type"]) == (
        status,
        "response.completed" if status == "completed" else "response.incomplete",
    )
    assert (final["incomplete_details"] is not None) == (reason == "length")
    items = final["output"]
    kinds = {"message": "content", "reasoning": "reasoning", "function_call": "call"}
    assert [
        (kinds[i["type"]], i["arguments"] if i["type"] == "function_call" else i["content"][0]["text"]) for i in items
    ] == expected
    assert len({item["id"] for item in items}) == len(items)
    for index, item in enumerate(items):
        mine = [event for event in events if event.get("output_index") == index]
        places = [events.index(event) for event in mine]
        assert places == list(range(places[0], places[-1] + 1))  # one item at a time
        assert mine[0]["item"] | {"status": item["status"], "content": 0, "arguments": 0} == item | {
            "content": 0,
            "arguments": 0,
        }
        assert (mine[0]["type"], mine[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert mine[-1]["item"] == item
        told = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        (done,) = [
            e for e in mine if e["type"].endswith((".output_text.done", ".reasoning_text.done", "_arguments.done"))
        ]
        assert told == done.get("text", done.get("arguments")) == expected[index][1]
        assert all(event["item_id"] == item["id"] for event in mine[1:-1])
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert (final["usage"]["input_tokens"], final["usage"]["output_tokens"]) == (7, 5)


@given(stories(), st.sampled_from(["stop", "length", "tool_calls", "abort"]))
def test_a_message(story: tuple[list[tuple[str, str]], list[list[Delta]]], reason: str) -> None:
    expected, steps = story
    builder = MessageBuilder(Talk(), max_tokens=5)  # type: ignore[arg-type]
    events = [plain(event) for event in builder.start()]
    for one in news(steps, reason):
        events += [plain(event) for event in builder.feed(one)]
    events += [plain(event) for event in builder.finish()]
    kinds = [event["type"] for event in events]
    assert (kinds[:2], kinds[-2:]) == (["message_start", "ping"], ["message_delta", "message_stop"])
    assert events[0]["message"]["content"] == []
    whole = plain(builder.whole())
    blocks = {"text": "content", "thinking": "reasoning", "tool_use": "call"}
    got = [
        (blocks[b["type"]], json.dumps(b["input"]) if b["type"] == "tool_use" else b.get("text", b.get("thinking")))
        for b in whole["content"]
    ]
    assert got == expected
    body = events[2:-2]
    assert [event["index"] for event in body] == sorted(event["index"] for event in body)
    for index in range(len(whole["content"])):
        mine = [event for event in body if event["index"] == index]
        assert (mine[0]["type"], mine[-1]["type"]) == ("content_block_start", "content_block_stop")
        told = "".join(
            event["delta"].get("text", event["delta"].get("thinking", event["delta"].get("partial_json", "")))
            for event in mine[1:-1]
        )
        assert told == expected[index][1]
    stop = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "abort"}[reason]
    if reason == "stop" and expected[-1][0] == "call":  # chat ends a call by name like that
        stop = "tool_use"
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == stop
    assert whole["usage"] == events[-2]["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (4, 3)


def test_a_stop_sequence_is_named() -> None:
    builder = MessageBuilder(Talk(), max_tokens=5)  # type: ignore[arg-type]
    list(builder.feed(ChatEvent(0, [Content("x")], [1], None, "stop", "END")))
    whole = plain(builder.whole())
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


def test_a_full_context_is_not_max_tokens() -> None:
    builder = MessageBuilder(Talk(), max_tokens=6)  # type: ignore[arg-type]
    list(builder.feed(ChatEvent(0, [Content("x")], [1], None, "length", None)))
    assert plain(builder.whole())["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, 2', {"a": [1, 2]}), ('{"a": "lon', {"a": "lon"}), ("", {}), ("[1]", {}), ("nonsense", {})],
)
def test_a_call_that_was_cut_off_keeps_what_it_has(arguments: str, expected: dict[str, Any]) -> None:
    builder = MessageBuilder(Talk(), max_tokens=5)  # type: ignore[arg-type]
    list(builder.feed(ChatEvent(0, [ToolCallDelta(0, arguments, "c", "f")], [1], None, "length", None)))
    assert plain(builder.whole())["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": expected}]


def test_a_response_that_breaks_says_so() -> None:
    builder = ResponseBuilder(Talk(), ECHO)  # type: ignore[arg-type]
    list(builder.feed(ChatEvent(0, [Content("x")], [1], None, None, None)))
    failed = plain(builder.fail("it broke"))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "x"
