"""/v1/responses through OpenAI's own client, over an engine without a model."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from octavo.entrypoints.api.responses.requests import ResponsesRequest, to_chat
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.exceptions import ValidationError
from tests.server.fake_engine import FakeEngine, ToolTokenizer


def client_of(engine: FakeEngine) -> openai.AsyncOpenAI:
    app = build_app(ServerState([ServedModel("m", engine=engine)]))  # type: ignore[arg-type]
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(base_url="http://octavo/v1", api_key="none", max_retries=0, http_client=http)


async def test_a_response_is_openais() -> None:
    async with client_of(FakeEngine()) as client:
        response = await client.responses.create(
            model="m", input="hi", instructions="be brief", max_output_tokens=3, metadata={"a": "b"}, user="u"
        )
    assert response.output_text == "abc"
    assert (response.status, response.store if hasattr(response, "store") else False) == ("incomplete", False)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.metadata, response.user, response.instructions) == ({"a": "b"}, "u", "be brief")
    assert response.usage is not None
    assert response.usage.input_tokens == len("system:be brief\nuser:hi\nassistant:")
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == 3


async def test_a_stream_ends_as_the_whole_answer() -> None:
    engine = FakeEngine()
    engine.text = "well"
    async with client_of(engine) as client:
        async with client.responses.stream(model="m", input="hi") as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        whole = await client.responses.create(model="m", input="hi")
    assert streamed.output_text == whole.output_text == "well"
    assert (streamed.status, streamed.usage) == (whole.status, whole.usage) == ("completed", whole.usage)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == 4


async def test_logprobs_of_text() -> None:
    async with client_of(FakeEngine()) as client:
        response = await client.responses.create(
            model="m", input="x", max_output_tokens=2, top_logprobs=2, include=["message.output_text.logprobs"]
        )
        content = response.output[0].content[0]  # type: ignore[union-attr]
        assert [entry.token for entry in content.logprobs] == ["a", "b"]
        assert [len(entry.top_logprobs) for entry in content.logprobs] == [2, 2]


async def test_a_stream_that_breaks_ends_with_failed() -> None:
    engine = FakeEngine()
    engine.fail_after = 2
    async with client_of(engine) as client:
        stream = await client.responses.create(model="m", input="x", max_output_tokens=5, stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "this one failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
CALLING = '<think>hm</think>Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def calling_engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=600)
    engine.tokenizer, engine.text = ToolTokenizer(), CALLING
    return engine


async def test_thinking_and_calls_are_items() -> None:
    async with client_of(calling_engine()) as client:
        whole = await client.responses.create(model="m", input="1 + 1?", tools=[TOOL])
        async with client.responses.stream(model="m", input="1 + 1?", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        again: Any = [{"role": "user", "content": "1 + 1?"}, *whole.output]
        call = whole.output[-1]
        assert call.type == "function_call"
        again.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        await client.responses.create(model="m", input=again, tools=[TOOL])
    for response in (whole, streamed):
        thought, said, called = response.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert thought.content[0].text == "hm"
        assert response.output_text == "Well."
        assert said.type == "message"
        assert called.type == "function_call"
        assert (called.name, called.arguments, called.status) == ("add", '{"a": 1}', "completed")
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert "response.reasoning_text.done" in kinds
    assert "response.function_call_arguments.done" in kinds


async def test_tokens_are_counted_without_running() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        counted = await client.responses.input_tokens.count(model="m", input="hi")
    assert counted.input_tokens == len("user:hi\nassistant:")
    assert engine.seen == []


@pytest.mark.parametrize(
    ("body", "parameter", "word"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "not stored"),
        ({"background": True}, "background", "background"),
        ({"conversation": "c"}, "conversation", "not stored"),
        ({"prompt": {"id": "p"}}, "prompt", "templates"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
        ({"max_output_tokens": 500}, "max_output_tokens", "64"),
        ({"input": "x" * 99}, "input", "64"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ({"temperature": 3.0}, "temperature", "[0, 2]"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}}, "tool_choice", "'g'"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "object"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(body: dict[str, Any], parameter: str, word: str) -> None:
    async with client_of(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body={"input": "x", **body}, cast_to=dict[str, Any])
    assert refused.value.body["param"] == parameter  # type: ignore[index]
    assert word in refused.value.message


async def test_nothing_is_stored() -> None:
    async with client_of(FakeEngine()) as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")


def test_items_become_the_turns_they_were() -> None:
    def said(kind: str, text: str) -> list[dict[str, str]]:
        return [{"type": kind, "text": text}]

    items = [
        {"role": "user", "content": said("input_text", "add")},
        {"type": "reasoning", "id": "rs", "summary": [], "content": said("reasoning_text", "hm")},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": said("output_text", "ok"),
        },
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": said("input_text", "2")},
        {"type": "message", "role": "developer", "content": "briefly"},
    ]
    chat = to_chat(ResponsesRequest.model_validate({"input": items, "instructions": "calculate"}))
    turns = [message.model_dump(exclude_none=True) for message in chat.messages]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert turns == [
        {"role": "system", "content": "calculate"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "ok", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "developer", "content": "briefly"},
    ]


def test_a_null_asks_for_nothing() -> None:
    names = ("background", "conversation", "previous_response_id", "prompt", "tools", "text", "reasoning", "seed")
    to_chat(ResponsesRequest.model_validate({"input": "x", **dict.fromkeys(names)}))
    with pytest.raises(ValidationError):
        to_chat(ResponsesRequest.model_validate({"input": "x", "background": 1}))
