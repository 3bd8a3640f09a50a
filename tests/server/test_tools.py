"""Tool calls and reasoning over the chat route: shapes of answers and chunks, what the model is shown, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.config import ChatConfig
from octavo.entrypoints.app import build_app
from octavo.entrypoints.server.state import ServedModel, ServerState
from tests.server.scripted_engine import HERMES_TEMPLATE, THINKING_TEMPLATE, ScriptedEngine

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [NOW, WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "N\\u00eemes {}"}}\n</tool_call>'


async def post(engine: ScriptedEngine, config: ChatConfig | None = None, **fields: Any) -> httpx.Response:
    state = ServerState([ServedModel("m", engine=engine, chat_config=config or ChatConfig())])  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/chat/completions", json={**ASK, **fields})


def said(script: str, template: str = HERMES_TEMPLATE, **options: Any) -> ScriptedEngine:
    engine = ScriptedEngine(template, **options)
    engine.scripts = [script]
    return engine


def refusal(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def folded(response: httpx.Response) -> dict[str, Any]:
    """The message that the chunks of choice 0 make up, checked for OpenAI's rules."""
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for line in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(message["calls"])
                assert piece["type"] == "function"
                message["calls"].append([piece["function"]["name"], ""])
            else:
                assert "name" not in piece["function"]
            message["calls"][piece["index"]][1] += piece["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def both(engine: ScriptedEngine, config: ChatConfig | None = None, **fields: Any) -> dict[str, Any]:
    """The whole answer, which must be what the streamed one adds up to."""
    choice = (await post(engine, config, **fields)).json()["choices"][0]
    message = choice["message"]
    whole = {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
    }
    assert folded(await post(engine, config, stream=True, **fields)) == whole
    return whole


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
async def test_a_call_is_the_same_streamed_and_whole(step: int) -> None:
    answer = await both(said("Let me see.\n" + CALL, step=step))
    assert answer == {
        "content": "Let me see.",
        "reasoning": "",
        "calls": [["get_weather", '{"city": "N\\u00eemes {}"}']],
        "finish_reason": "tool_calls",
    }


async def test_a_call_alone_has_no_content_and_its_id_comes_once() -> None:
    body = (await post(said(CALL))).json()
    message = body["choices"][0]["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    streamed = (await post(said(CALL), stream=True)).text
    assert streamed.count('"id":"call_') == 1


async def test_a_call_without_arguments() -> None:
    answer = await both(said('<tool_call>{"name":"now","arguments":{}}</tool_call>'))
    assert (answer["calls"], answer["finish_reason"]) == ([["now", "{}"]], "tool_calls")


async def test_a_named_choice_ends_with_stop_and_length_stays_length() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert (await both(said(CALL), tool_choice=named))["finish_reason"] == "stop"
    engine = said(CALL[:60])
    engine.finish_reason = "length"
    answer = await both(engine)
    assert answer["finish_reason"] == "length"
    assert answer["calls"] == [["get_weather", '{"city": "N']]


async def test_parallel_calls_and_only_the_first() -> None:
    two = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert [name for name, _ in (await both(said(two)))["calls"]] == ["get_weather", "now"]
    assert [name for name, _ in (await both(said(two), parallel_tool_calls=False))["calls"]] == ["get_weather"]


async def test_choice_none_shows_no_tools_and_reads_no_calls() -> None:
    engine = said(CALL)
    assert (await both(engine, tool_choice="none"))["content"] == CALL
    assert "get_weather" not in engine.prompts[0]
    config = ChatConfig(exclude_tools_when_tool_choice_none=False)
    assert (await both(engine, config, tool_choice="none"))["calls"] == []
    assert "get_weather" in engine.prompts[-1]


async def test_the_model_sees_tools_calls_and_results() -> None:
    engine = said("ok")
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"x": [1]}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    assert (await post(engine, messages=history)).status_code == 200
    prompt = engine.prompts[0]
    assert '{"type": "function", "function": {"name": "now", "parameters"' in prompt
    assert '<tool_call>\n{"name": "now", "arguments": {"x": [1]}}\n</tool_call>' in prompt
    assert "<|user|>a\nb<|assistant|>" in prompt
    assert "<|tool|>noon<|assistant|>" in prompt


async def test_templates_that_print_arguments_get_text() -> None:
    template = HERMES_TEMPLATE.replace("call.function.arguments | tojson", "call.function.arguments")
    engine = said("ok", template)
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"x":1}'}}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    await post(engine, messages=messages)
    assert '"arguments": {"x":1}}' in engine.prompts[0]


async def test_thinking_is_told_from_the_answer() -> None:
    engine = said("Hm, hm.\n</think>\n\nYes. " + CALL, THINKING_TEMPLATE)
    answer = await both(engine)
    assert (answer["reasoning"], answer["content"]) == ("Hm, hm.", "Yes.")
    assert answer["finish_reason"] == "tool_calls"
    assert (await both(engine, include_reasoning=False))["reasoning"] == ""
    body = (await post(engine)).json()
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm, hm.")}


async def test_thinking_can_be_switched_off_and_goes_into_the_history() -> None:
    engine = said("Yes.", THINKING_TEMPLATE)
    assert (await both(engine, reasoning_effort="none"))["content"] == "Yes."
    assert engine.prompts[0].endswith("<think>\n\n</think>\n\n")
    config = ChatConfig(default_chat_template_kwargs='{"enable_thinking": false}')
    assert (await both(engine, config))["reasoning"] == ""
    assert (await both(engine, config, chat_template_kwargs={"enable_thinking": True}))["reasoning"] == "Yes."


async def test_the_flags_override_what_the_template_says() -> None:
    config = ChatConfig(reasoning_parser="none", tool_call_parser="llama3_json")
    answer = await both(said('{"name": "now"}', THINKING_TEMPLATE), config)
    assert answer["calls"] == [["now", "{}"]]


async def test_models_are_shown_with_their_parsers() -> None:
    state = ServerState([ServedModel("m", engine=said("", THINKING_TEMPLATE))])  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=build_app(state)), base_url="http://test") as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["tool_call_parser"], card["reasoning_parser"]) == ("hermes", "qwen3")


def with_parameters(parameters: Any) -> dict[str, Any]:
    return {"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no', which is not among"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", ""),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "twice"),
        ({"tools": [NOW] * 2000}, "tools", "1024"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "must match"),
        ({"tools": [{"type": "web_search"}]}, "tools", ""),
        (with_parameters({"type": "array"}), "tools[1].function.parameters", "'object'"),
        (with_parameters({"properties": {"a": {"type": "objekt"}}}), "tools[1].function.parameters", "'objekt'"),
        (with_parameters({"properties": {"a": 3}}), "tools[1].function.parameters", "properties.a must be"),
        (with_parameters({"properties": []}), "tools[1].function.parameters", "properties must be"),
        (with_parameters({"anyOf": []}), "tools[1].function.parameters", "anyOf must be"),
        (with_parameters({"description": "x" * (1 << 20)}), "tools", "bytes of JSON"),
        ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "only text",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "messages", ""),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    named, message = refusal(await post(said("x"), **fields))
    assert named == param
    assert words in message


async def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(80):
        schema = {"type": "object", "properties": {"a": schema}}
    assert "nested" in refusal(await post(said("x"), **with_parameters(schema)))[1]


async def test_a_template_without_tools_refuses_them_unless_none_may_be_called() -> None:
    engine = said("x", "{% for m in messages %}{{ m.content }}{% endfor %}")
    param, message = refusal(await post(engine))
    assert (param, "does not take tools" in message) == ("tools", True)
    assert (await post(engine, tool_choice="none")).status_code == 200
    assert (await post(engine, tools=[])).status_code == 200


async def test_calls_that_nobody_reads_are_refused() -> None:
    engine = said("x", "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "no format that octavo knows" in refusal(await post(engine))[1]
    assert "--tool-call-parser is none" in refusal(await post(said("x"), ChatConfig(tool_call_parser="none")))[1]


async def test_a_trusted_request_brings_its_own_template() -> None:
    engine = said("x")
    config = ChatConfig(trust_request_chat_template=True)
    template = "{% for m in messages %}({{ m.content }}){% endfor %}{{ documents | length }}"
    response = await post(engine, config, tools=[], chat_template=template, documents=[{"text": "a"}])
    assert response.status_code == 200
    assert engine.prompts == ["(hi)1"]


async def test_echo_prompt_text_and_the_role() -> None:
    engine = said("lo")
    fields = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hel"}], "tools": []}
    body = (await post(engine, **fields, continue_final_message=True, echo=True, return_prompt_text=True)).json()
    assert body["choices"][0]["message"]["content"] == "hello"
    assert body["prompt_text"] == engine.prompts[0]
    assert body["prompt_text"].endswith("<|assistant|>hel")
    streamed = await post(engine, **fields, continue_final_message=True, echo=True, stream=True)
    assert folded(streamed)["content"] == "hello"
    body = (await post(engine, ChatConfig(response_role="bot"), tools=[])).json()
    assert body["choices"][0]["message"]["role"] == "bot"


async def test_each_choice_is_read_for_itself() -> None:
    engine = said(CALL)
    engine.scripts = [CALL, "Plain words."]
    choices = (await post(engine, n=2)).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["tool_calls", "stop"]
    assert choices[1]["message"]["content"] == "Plain words."
