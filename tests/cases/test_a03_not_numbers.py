"""A03: NaN and infinities pass a plain ``<``; here none reaches the engine, and the refusal itself is valid JSON."""

from __future__ import annotations

import json
import math

import pytest

from octavo import SamplingParams
from octavo.exceptions import ValidationError
from tests.cases.asking import ask_raw, refused
from tests.server.running_server import RunningServer

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
BODIES = {
    "/v1/completions": '{{"prompt": "x", "max_tokens": 1, {}}}',
    "/v1/chat/completions": '{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, {}}}',
}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "Infinity", "1e999", "-1e400", "1" + "0" * 400])
@pytest.mark.parametrize("name", [*NUMBERS, "length_penalty"])
@pytest.mark.parametrize("path", BODIES)
def test_over_http(live_server: RunningServer, path: str, name: str, value: str) -> None:
    response = ask_raw(live_server, BODIES[path].format(f'"{name}": {value}'), path)
    refused(response, name)
    json.loads(response.text, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))


@pytest.mark.parametrize("field", ["n", "max_tokens", "top_k", "seed", "min_tokens", "logprobs", "priority"])
@pytest.mark.parametrize("value", ["NaN", "1e999", "0.5", '"1"', "[]", "-1" + "0" * 300])
def test_whole_numbers_over_http(live_server: RunningServer, field: str, value: str) -> None:
    refused(ask_raw(live_server, BODIES["/v1/completions"].format(f'"{field}": {value}')), field)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_in_python(name: str, value: float) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    with pytest.raises(ValidationError):
        SamplingParams(logit_bias={5: value})
