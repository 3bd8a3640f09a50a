"""/v1/messages through Anthropic's own client, over an engine without a model."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest

from octavo.config import ServerConfig
from octavo.entrypoints.api.messages.requests import MessagesRequest, to_chat
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.messages import ThinkingTokens
from tests.server.fake_engine import FakeEngine, ToolTokenizer

USER: Any = {"role": "user", "content": "hi"}


def client_of(engine: FakeEngine, *keys: str, strict: bool = False) -> anthropic.AsyncAnthropic:
    config = ServerConfig(api_key=keys, strict=strict)
    app = build_app(ServerState([ServedModel("m", engine=engine)], config=config))  # type: ignore[arg-type]
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return anthropic.AsyncAnthropic(base_url="http://octavo", api_key="k", max_retries=0, http_client=http)


async def test_a_message_is_anthropics() -> None:
    async with client_of(FakeEngine(), "k") as client:
        message = await client.messages.create(model="m", max_tokens=3, system="be brief", messages=[USER])
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert message.content[0].text == "abc"  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.input_tokens + 3 == len("system:be brief\nuser:hi\nassistant:")
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.output_tokens == 3


async def test_a_stream_ends_as_the_whole_message() -> None:
    engine = FakeEngine()
    engine.text = "well"
    async with client_of(engine) as client:
        async with client.messages.stream(model="m", max_tokens=30, messages=[USER]) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        whole = await client.messages.create(model="m", max_tokens=30, messages=[USER])
    assert text == "well"
    same = ("content", "stop_reason", "stop_sequence", "role", "model")
    assert [getattr(streamed, name) for name in same[1:]] == [getattr(whole, name) for name in same[1:]]
    assert streamed.content[0].text == whole.content[0].text == "well"  # type: ignore[union-attr]
    assert streamed.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)
    assert whole.stop_reason == "end_turn"


TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALLING = '<think>hm</think>Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def calling_engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=600)
    engine.tokenizer, engine.text = ToolTokenizer(), CALLING
    return engine


async def test_thinking_and_calls_are_blocks() -> None:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 300, "messages": [USER], "tools": [TOOL]}
    async with client_of(calling_engine()) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        named = await client.messages.create(**asked, tool_choice={"type": "tool", "name": "add"})
        silent = await client.messages.create(**asked, extra_body={"thinking": {"type": "x", "display": "omitted"}})
        result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "2"}  # type: ignore[union-attr]
        turns: Any = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        await client.messages.create(**{**asked, "messages": turns})
    for message in (whole, streamed):
        thought, said, called = message.content
        assert thought.type == "thinking"
        assert thought.thinking == "hm"
        assert said.type == "text"
        assert said.text == "Well."
        assert called.type == "tool_use"
        assert (called.name, called.input) == ("add", {"a": 1})
        assert message.stop_reason == "tool_use"
    assert named.stop_reason == "tool_use"
    assert [block.type for block in silent.content] == ["text", "tool_use"]


async def test_an_assistants_last_words_are_continued() -> None:
    prompt = [USER, {"role": "assistant", "content": "So"}]
    chat = to_chat(MessagesRequest.model_validate({"messages": prompt, "max_tokens": 1}))
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


async def test_tokens_are_counted_without_running() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        counted = await client.messages.count_tokens(model="m", messages=[USER])
    assert counted.input_tokens == len("user:hi\nassistant:")
    assert engine.seen == []


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content blocks"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, "64 tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"top_p": 2.0}, "top_p"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tool_choice": {"type": "tool"}}, "name"),
    ],
)
async def test_what_cannot_be_is_refused_in_words(body: dict[str, Any], word: str) -> None:
    asked = {"model": "m", "max_tokens": 3, "messages": [USER], **body}
    async with client_of(FakeEngine()) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.post("/v1/messages", body=asked, cast_to=dict[str, Any])
    error = refused.value.body
    assert isinstance(error, dict)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert word in error["error"]["message"]


async def test_errors_are_anthropics() -> None:
    async with client_of(FakeEngine()) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=3, messages=[USER])
    async with client_of(FakeEngine(), "other") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="m", max_tokens=3, messages=[USER])
    engine = FakeEngine()
    engine.fail_after = 2
    async with client_of(engine) as client:
        stream = await client.messages.create(model="m", max_tokens=5, messages=[USER], stream=True)
        with pytest.raises(anthropic.APIStatusError, match="this one failed"):
            async for _ in stream:
                pass


def test_blocks_become_the_turns_they_were() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}], **cached},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "be", **cached}, {"type": "text", "text": "brief"}]
    body = {"messages": messages, "system": system, "max_tokens": 1, "metadata": {"user_id": "u"}}
    request = MessagesRequest.model_validate(body)
    turns = [message.model_dump(exclude_none=True) for message in to_chat(request).messages]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert turns == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "ok", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": "go on"},
    ]
    assert request.ignored(budget=False) == []


class ThinkingTokenizer(ToolTokenizer):
    """Each tag around the thinking is one token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tag = {"<think>": [5], "</think>": [6]}.get(text)
        return tag or super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("bounded", [True, False])
async def test_a_budget_of_thinking(bounded: bool) -> None:
    engine = calling_engine()
    engine.tokenizer = ThinkingTokenizer() if bounded else engine.tokenizer
    thinking: Any = {"type": "enabled", "budget_tokens": 7, "colour": "red"}
    async with client_of(engine) as client:
        answer = await client.messages.with_raw_response.create(
            model="m", max_tokens=300, messages=[USER], thinking=thinking, extra_body={"output_config": {"size": 1}}
        )
    (params,) = engine.seen
    ignored = answer.headers["x-octavo-ignored-fields"].split(", ")
    assert ignored == ["output_config.size", "thinking.colour", *([] if bounded else ["thinking.budget_tokens"])]
    assert params.thinking_token_budget == (7 if bounded else None)
    assert params.thinking == (ThinkingTokens(start=5, end=6) if bounded else None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_strict_server_refuses_unknown_fields(path: str) -> None:
    body = {"model": "m", "max_tokens": 3, "messages": [USER], "metadata": {"user_id": "u"}, "seed": 1}
    async with client_of(FakeEngine(), strict=True) as client:
        await client.post(path, body=body, cast_to=dict[str, Any])
        with pytest.raises(anthropic.BadRequestError, match=r"'temprature'.*--strict"):
            await client.post(path, body={**body, "temprature": 1}, cast_to=dict[str, Any])
