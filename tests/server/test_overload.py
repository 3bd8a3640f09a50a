"""What clients are told when there is too much to do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.exceptions import OverloadedError
from tests.server.fake_engine import FakeEngine
from tests.server.test_requests import client_of

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(route: str, stream: bool) -> None:
    engine = FakeEngine()
    engine.overload = OverloadedError("too much is waiting", reason="max_num_queued_reqs", retry_after=2.1)
    async with client_of(engine) as client:
        answer: httpx.Response = await client.post(route, json={**ROUTES[route], "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        error = answer.json()["error"]
        assert error["message"] == "too much is waiting"
        assert error["type"] == ("rate_limit_error" if route == "/v1/messages" else "RateLimitError")
        engine.overload = OverloadedError("too much is waiting", reason="max_num_queued_reqs")
        assert (await client.post(route, json=ROUTES[route])).headers["retry-after"] == "1"
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        engine.overload = None
        assert (await client.post(route, json=ROUTES[route])).status_code == 200
