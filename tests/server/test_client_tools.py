"""Tools and structured output through both official clients, on the real model under a template that takes tools.

The model was never taught to call: ``required`` and its likes make the grammar write the frame, the model the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.server.running_server import RunningServer, running_server

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if tools -%}
<|im_start|>system
Call functions like <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED = "What will the weather be in Rome in 3 days?"
CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": ASKED}]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
RESPONSE: dict[str, Any] = {
    **{"model": "smollm2", "input": ASKED, "temperature": 0, "max_output_tokens": 80},
    "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
}
MESSAGE: dict[str, Any] = {
    **{**CHAT, "max_tokens": 80, "extra_body": {"temperature": 0}},
    "tools": [{"name": "weather", "input_schema": PARAMETERS}],
}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def tool_server(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = Path(tmp_path_factory.mktemp("template")) / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = f"--served-model-name smollm2 --max-model-len 1024 --kv-cache-memory 64MiB --chat-template {template}"
    with running_server(smollm2_path, *flags.split()) as server:
        server.wait_until_ready()
        yield server
        server.wait_until_idle()


@pytest.fixture
def theirs(tool_server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def ours(tool_server: RunningServer) -> openai.OpenAI:
    return tool_server.client()


def check(arguments: Any) -> None:
    """The arguments follow the schema."""
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] <= 9


def test_the_three_protocols_call_alike(ours: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    asked = {**CHAT, "tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 80}
    chat = ours.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    assert chat.choices[0].finish_reason == "tool_calls"
    (call,) = chat.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    check(arguments)
    response = ours.responses.create(**RESPONSE, tool_choice="required", parallel_tool_calls=False)
    item = response.output[-1]
    assert item.type == "function_call"
    assert (item.name, json.loads(item.arguments), response.status) == ("weather", arguments, "completed")
    message = theirs.messages.create(**MESSAGE, tool_choice=ANY)
    block = message.content[-1]
    assert block.type == "tool_use"
    assert (block.name, block.input, message.stop_reason) == ("weather", arguments, "tool_use")


def test_streams_end_as_the_whole(ours: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    named: Any = {"type": "function", "name": "weather"}
    whole = ours.responses.create(**RESPONSE, tool_choice=named)
    with ours.responses.stream(**RESPONSE, tool_choice=named) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    for response in (whole, final):
        assert response.output[-1].type == "function_call"
        assert response.output[-1].arguments == told
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    message = theirs.messages.create(**MESSAGE, tool_choice=choice)
    with theirs.messages.stream(**MESSAGE, tool_choice=choice) as events:
        streamed = events.get_final_message()
    assert message.stop_reason == streamed.stop_reason == "tool_use"
    assert message.content[-1].type == streamed.content[-1].type == "tool_use"
    assert message.content[-1].input == streamed.content[-1].input == json.loads(told)


def test_results_go_back(ours: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    """Both protocols' ways to say it come to one prompt, so to one answer."""
    response = ours.responses.create(**RESPONSE, tool_choice="required", parallel_tool_calls=False)
    call = response.output[-1]
    assert call.type == "function_call"
    items: Any = [*CHAT["messages"], *response.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."})
    after = ours.responses.create(**{**RESPONSE, "input": items}, tool_choice="none")
    message = theirs.messages.create(**MESSAGE, tool_choice=ANY)
    use = message.content[-1]
    assert use.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 21 degrees."}
    turns: Any = [*CHAT["messages"], {"role": "assistant", "content": message.content}]
    turns.append({"role": "user", "content": [result]})
    then = theirs.messages.create(**{**MESSAGE, "messages": turns}, tool_choice={"type": "none"})
    assert after.output_text
    assert then.content[0].type == "text"
    assert then.content[0].text == after.output_text
    counted = theirs.messages.count_tokens(
        model="smollm2", messages=turns, tools=MESSAGE["tools"], tool_choice={"type": "none"}
    )
    assert after.usage is not None
    assert counted.input_tokens == after.usage.input_tokens


class City(pydantic.BaseModel):
    name: str
    country: str


def test_structured_output_is_parsed(ours: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Name the capital of France and its country."}]
    chat = ours.chat.completions.parse(
        model="smollm2", messages=asked, response_format=City, temperature=0, max_tokens=80
    )
    city = chat.choices[0].message.parsed
    assert city is not None
    response = ours.responses.parse(model="smollm2", input=asked, text_format=City, temperature=0, max_output_tokens=80)
    assert response.output_parsed == city
    with ours.responses.stream(
        model="smollm2", input=asked, text_format=City, temperature=0, max_output_tokens=80
    ) as stream:
        assert stream.get_final_response().output_parsed == city
    message = theirs.messages.parse(
        model="smollm2", max_tokens=80, messages=asked, output_format=City, extra_body={"temperature": 0}
    )
    assert message.parsed_output == city


def test_what_cannot_be_compiled_is_refused(ours: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    schema = {"type": "nonsense"}
    wrong: Any = {"type": "json_schema", "name": "x", "schema": schema}
    with pytest.raises(openai.BadRequestError, match="nonsense") as refused:
        ours.responses.create(model="smollm2", input="x", text={"format": wrong})
    assert refused.value.param == "text"
    with pytest.raises(anthropic.BadRequestError, match="nonsense"):
        theirs.messages.create(
            **CHAT, max_tokens=9, output_config={"format": {"type": "json_schema", "schema": schema}}
        )
    with pytest.raises(openai.BadRequestError, match="umbrella"):
        ours.responses.create(**RESPONSE, tool_choice={"type": "function", "name": "umbrella"})


def test_a_template_without_tools_says_so(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="does not take tools") as refused:
        server.client().responses.create(**RESPONSE)
    assert refused.value.param == "tools"
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    with pytest.raises(anthropic.BadRequestError, match="does not take tools"):
        client.messages.create(**MESSAGE)
