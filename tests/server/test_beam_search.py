"""Beam search over HTTP: fields, refusals, and that a stream gives what a whole answer does."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.entrypoints.server.state import ServedModel, ServerState
from octavo.messages import BeamSearch
from tests.server.fake_engine import FakeEngine
from tests.server.test_protocol import CHAT, client_of

FIELDS = {"use_beam_search": True, "n": 2, "best_of": 5, "length_penalty": 0.5, "early_stopping": "never"}


async def test_fields_and_no_defaults_of_drawing() -> None:
    engine, defaults = FakeEngine(), {"temperature": 0.25, "repetition_penalty": 1.1}
    state = ServerState([ServedModel("m", engine=engine, sampling_defaults=defaults)])  # type: ignore[arg-type]
    async with client_of(state) as client:
        await client.post("/v1/completions", json={"prompt": "x", **FIELDS})
        await client.post("/v1/chat/completions", json={**CHAT, "use_beam_search": True, "n": 3})
        await client.post("/v1/completions", json={"prompt": "x", **FIELDS, "use_beam_search": False, "best_of": 2})
    first, second, third = engine.seen
    assert first.beam_search == BeamSearch(beam_width=5, length_penalty=0.5, early_stopping="never")
    assert second.beam_search == BeamSearch(beam_width=3)
    assert [(params.n, params.repetition_penalty) for params in engine.seen] == [(2, 1.0), (3, 1.0), (2, 1.1)]
    assert third.beam_search is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": -1}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": -3}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": False, "best_of": 3}, "best_of"),
    ],
)
async def test_refusals(fields: dict[str, Any], param: str) -> None:
    async with client_of(ServerState([ServedModel("m", engine=FakeEngine())])) as client:  # type: ignore[arg-type]
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
            response = await client.post(f"/v1/{path}", json={**body, "use_beam_search": True, "n": 2, **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith(param)
