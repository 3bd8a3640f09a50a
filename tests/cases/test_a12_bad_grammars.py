"""A12: a grammar that makes no sense is its own request's 400, and the next one works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.exceptions import ValidationError
from octavo.messages import StructuredOutputsParams
from tests.cases.asking import answered, ask, refused
from tests.server.running_server import RunningServer

GRAMMAR = 'root ::= "yes" | "no"\n'
BAD = [
    ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "structured_outputs.grammar", "defined twice"),
    ({"grammar": 'start: "a"\nstart: "b"'}, "structured_outputs.grammar", "duplicate rule"),
    ({"grammar": "root ::= missing"}, "structured_outputs.grammar", "missing"),
    ({"regex": "("}, "structured_outputs.regex", "unclosed group"),
    ({"json": {"type": "objekt"}}, "structured_outputs.json", "objekt"),
    ({"json": '{"type": "object"'}, "structured_outputs.json", "not valid JSON"),
    ({"json": {"$ref": "#/$defs/nowhere"}}, "structured_outputs.json", "nowhere"),
    ({"json": {"$ref": "http://127.0.0.1:1/schema"}}, "structured_outputs.json", "not present"),
    ({"json": {}, "regex": "a"}, "structured_outputs", "got json and regex"),
    ({}, "structured_outputs", "got none"),
    ({"choice": []}, "structured_outputs.choice", "one or more"),
    ({"choice": [1]}, "structured_outputs.choice", "strings"),
    ({"regexp": "a"}, "structured_outputs", "regexp"),
    ({"structural_tag": {"type": "structural_tag"}}, "structured_outputs.structural_tag", "format"),
]
MESSAGES = [{"role": "user", "content": "Say yes or no."}]


@pytest.mark.parametrize(("given", "param", "words"), BAD)
def test_each_is_a_400_and_a_good_one_still_works(
    live_server: RunningServer, given: dict[str, Any], param: str, words: str
) -> None:
    refused(ask(live_server, prompt="x", structured_outputs=given, stream=True), param, words)
    refused(ask(live_server, "/v1/chat/completions", messages=MESSAGES, structured_outputs=given), param, words)
    good = answered(ask(live_server, prompt="Yes or no?", structured_outputs={"grammar": GRAMMAR}, max_tokens=8))
    assert good["choices"][0]["text"] in ("yes", "no")
    assert good["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}, "objekt"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}, "strict"),
        ({"type": "xml"}, "xml"),
        ({}, "type"),
        ({"type": "structural_tag", "format": {"type": "song"}}, "song"),
    ],
)
def test_response_format_is_named_where_that_is_what_was_sent(
    live_server: RunningServer, form: dict[str, Any], words: str
) -> None:
    refused(ask(live_server, "/v1/chat/completions", messages=MESSAGES, response_format=form), "response_format", words)


def test_both_fields_at_once_are_refused(live_server: RunningServer) -> None:
    refused(
        ask(live_server, prompt="x", response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "structured_outputs",
        "both",
    )


def test_python_gets_the_same_words(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="Invalid type: objekt"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "objekt"})))
    (output,) = llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a{3}")))
    assert output.outputs[0].text == "aaa"


def test_every_kind_works_over_http(live_server: RunningServer) -> None:
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"json": {"enum": ["red", 7]}}, '"red"|7'),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*"),
        ({"regex": r"[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": GRAMMAR}, "yes|no"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "tag"}}}, "tag"),
    ]
    for given, pattern in kinds:
        body = answered(ask(live_server, prompt="The answer is ", structured_outputs=given, max_tokens=24))
        assert re.fullmatch(pattern, body["choices"][0]["text"], re.DOTALL), body["choices"][0]["text"]


def test_logprobs_beside_a_mask_are_json(live_server: RunningServer) -> None:
    """A08's other half: two legal tokens, five logprobs asked for."""
    body = answered(
        ask(
            live_server,
            "/v1/chat/completions",
            messages=MESSAGES,
            structured_outputs={"choice": ["yes", "no"]},
            logprobs=True,
            top_logprobs=5,
        )
    )
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) in (5, 6)  # the likeliest, and the chosen token where it is none of them
        assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]
        assert all(-9999.0 <= top["logprob"] <= 0.0 for top in entry["top_logprobs"])


def test_a_schema_through_response_format_streams_valid_json(live_server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "population": {"type": "integer"}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    for temperature in (0.0, 1.0):
        body = answered(
            ask(
                live_server,
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "Describe Paris as JSON."}],
                response_format=form,
                temperature=temperature,
                max_tokens=120,
            )
        )
        choice = body["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"city", "population"}


def test_constraints_that_leave_no_token_are_a_400_too_though_only_the_run_shows_it(live_server: RunningServer) -> None:
    fields = {"prompt": "x", "allowed_token_ids": [28], "structured_outputs": {"regex": "[0-9]+"}}
    refused(ask(live_server, **fields), "structured_outputs", "no token is left")
    stream = ask(live_server, **fields, stream=True)
    event, done = stream.text.split("\n\n")[:2]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == 400
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2**64}}, "repetition_detection"),
        ({"stream_interval": 2**64}, "stream_interval"),
        ({"vllm_xargs": {"a": 2**64}}, "vllm_xargs"),
    ],
)
def test_numbers_that_no_message_carries_are_refused(
    live_server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    refused(ask(live_server, prompt="x", **fields), param, "")
