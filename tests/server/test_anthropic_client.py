"""Anthropic's official client against the real server and the real model: what its users call first."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from tests.server.running_server import RunningServer

FRANCE: Any = {"role": "user", "content": "What is the capital of France?"}
ASKED: dict[str, Any] = {"model": "smollm2", "max_tokens": 20, "extra_body": {"temperature": 0}}


@pytest.fixture
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_and_its_stream_are_what_chat_says(client: anthropic.Anthropic, server: RunningServer) -> None:
    chat = server.client().chat.completions.create(model="smollm2", messages=[FRANCE], temperature=0, max_tokens=20)
    message = client.messages.create(messages=[FRANCE], **ASKED)
    assert text_of(message) == chat.choices[0].message.content
    assert "Paris" in text_of(message)
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    with client.messages.stream(messages=[FRANCE], **ASKED) as stream:
        told = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert told == text_of(final) == text_of(message)
    assert final.stop_reason == "end_turn"
    assert chat.usage is not None
    for usage in (message.usage, final.usage):
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
        assert usage.output_tokens == chat.usage.completion_tokens
    assert final.usage.cache_read_input_tokens  # asked a second time


def test_counted_is_what_is_read(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"system": "You are terse.", "messages": [FRANCE]}
    counted = client.messages.count_tokens(model="smollm2", **asked)
    read = client.messages.create(**asked, **ASKED).usage
    assert counted.input_tokens == read.input_tokens + (read.cache_read_input_tokens or 0)


def test_a_prefilled_answer_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = [FRANCE, {"role": "assistant", "content": "The capital of"}]
    message = client.messages.create(messages=begun, **ASKED)
    assert text_of(message).startswith(" France")


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[FRANCE], stop_sequences=[" is"], **ASKED)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " is")
    assert text_of(message) == "The capital of France"


def test_a_message_that_was_cut_says_so(client: anthropic.Anthropic) -> None:
    assert client.messages.create(messages=[FRANCE], **{**ASKED, "max_tokens": 2}).stop_reason == "max_tokens"


def test_more_tokens_than_the_context_holds_are_as_many_as_it_holds(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 32000, "extra_body": {"temperature": 0, "ignore_eos": True}}
    message = client.messages.create(messages=[FRANCE], **asked)
    assert message.stop_reason == "model_context_window_exceeded"
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens == 512


def test_cache_control_changes_no_answer(client: anthropic.Anthropic, server: RunningServer) -> None:
    block: Any = {"type": "text", "text": FRANCE["content"], "cache_control": {"type": "ephemeral"}}
    marked = client.messages.create(messages=[{"role": "user", "content": [block]}], **ASKED)
    assert text_of(marked) == text_of(client.messages.create(messages=[FRANCE], **ASKED))
    httpx.delete(f"{server.url}/v1/cache").raise_for_status()  # the pin with it


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("smollm2", "model", "smollm2")
    assert client.models.retrieve("smollm2") == model


def test_errors_have_the_clients_own_kinds(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="other", max_tokens=1, messages=[FRANCE])
    with pytest.raises(anthropic.BadRequestError, match="messages must not be empty"):
        client.messages.create(messages=[], **ASKED)
    with pytest.raises(anthropic.BadRequestError, match="512"):
        client.messages.create(messages=[{"role": "user", "content": "word " * 600}], **ASKED)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="smollm2", max_tokens=1, messages=[FRANCE], extra_body={"temperature": 2})


def test_the_request_id_is_the_servers(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[FRANCE], **ASKED, extra_headers={"X-Request-Id": "mine"})
    assert (message._request_id, message.id) == ("mine", "msg_mine")
