"""``cache_control`` keeps prefixes, usage says so, and a request can ask why the cache missed; on the real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running_server import RunningServer

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
LONG = "You keep the log of a lighthouse. Every ship that passes has a line in it, with its hour and its flag. "


@pytest.fixture
def fresh(server: RunningServer) -> Iterator[RunningServer]:
    """Nothing is cached or pinned, before and after."""
    httpx.delete(f"{server.url}/v1/cache").raise_for_status()
    yield server
    httpx.delete(f"{server.url}/v1/cache").raise_for_status()


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def pins(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/cache").json()["pins"]
    return found


def text(value: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": value} | ({} if control is None else {"cache_control": control})


def test_a_marked_system_prompt_is_kept(fresh: RunningServer) -> None:
    body = {
        "max_tokens": 2,
        "system": [text(LONG, HOUR), text("Answer in one word.")],
        "messages": [{"role": "user", "content": "Which flag did the last ship have?"}],
    }
    first = post(fresh, "/v1/messages", body)["usage"]
    total = post(fresh, "/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})[
        "input_tokens"
    ]
    assert first["cache_read_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] == 16
    assert first["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 16}
    assert first["input_tokens"] + first["cache_creation_input_tokens"] == total
    (pin,) = pins(fresh)
    assert (pin["tokens"], pin["blocks_held"], pin["tenant"]) == (16, 1, "")
    again = post(fresh, "/v1/messages", body)["usage"]
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] == total // 16 * 16
    assert again["input_tokens"] + again["cache_read_input_tokens"] == total
    assert len(pins(fresh)) == 1


def test_segments_are_counted_by_how_long_they_stay(fresh: RunningServer) -> None:
    turns = [
        {"role": "user", "content": [text("The first ship was the Aurora, at dawn, with a blue flag.", HOUR)]},
        {"role": "assistant", "content": "Noted: the Aurora, dawn, blue."},
        {"role": "user", "content": [text("The next ship was the Boreas, at noon, with a white flag.", EPHEMERAL)]},
    ]
    usage = post(fresh, "/v1/messages", {"max_tokens": 2, "system": LONG, "messages": turns})["usage"]
    created = usage["cache_creation"]
    assert created["ephemeral_1h_input_tokens"] >= 32
    assert created["ephemeral_5m_input_tokens"] >= 16
    assert sum(created.values()) == usage["cache_creation_input_tokens"]
    lives = sorted(pin["expires_at"] for pin in pins(fresh))
    assert 3200 < lives[1] - lives[0] < 3400
    more = [*turns, {"role": "assistant", "content": "Noted: the Boreas."}, {"role": "user", "content": "Any other?"}]
    body = {"max_tokens": 2, "system": LONG, "messages": more, "cache_control": EPHEMERAL}
    usage = post(fresh, "/v1/messages", body)["usage"]
    assert usage["cache_read_input_tokens"] >= sum(created.values())
    assert usage["cache_creation"]["ephemeral_5m_input_tokens"] > 0, "the whole, by the field of the request itself"


def test_chat_parts_are_kept_and_change_no_answer(fresh: RunningServer) -> None:
    def ask(*parts: dict[str, Any]) -> Any:
        messages = [{"role": "system", "content": list(parts)}, {"role": "user", "content": "Is a ship in sight?"}]
        return post(fresh, "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0})

    plain = ask(text(LONG), text("Be brief."))
    assert pins(fresh) == []
    marked = ask(text(LONG, EPHEMERAL), text("Be brief."))
    assert marked["choices"] == plain["choices"]
    (pin,) = pins(fresh)
    assert pin["blocks_held"] == pin["blocks"] == 1


def test_what_cache_control_must_be(fresh: RunningServer) -> None:
    def refused(path: str, words: str, **body: Any) -> None:
        error = post(fresh, path, {"max_tokens": 2, **body}, 400)["error"]
        assert words in error["message"], error

    say = {"role": "user", "content": "hi"}
    for control in ("yes", {"type": "persistent"}, {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "ttl": 5}):
        refused("/v1/messages", "system[0].cache_control: must be", system=[text("a", control)], messages=[say])  # type: ignore[arg-type]
        part = [{"role": "user", "content": [text("b", control)]}]  # type: ignore[arg-type]
        refused("/v1/chat/completions", "messages[0].content[0].cache_control: must be", messages=part)
        refused("/v1/messages", "cache_control: must be", cache_control=control, messages=[say])
    many = [{"role": "user", "content": [text(f"{i} ", EPHEMERAL) for i in range(5)]}]
    refused("/v1/messages", "at most 4 may be given, got 5", messages=many)
    refused("/v1/chat/completions", "at most 4 may be given, got 5", messages=many)
    post(
        fresh, "/v1/messages", {"max_tokens": 2, "messages": [say], "system": [text("x", None)], "cache_control": None}
    )


def test_a_report_says_where_the_prompt_departs(fresh: RunningServer) -> None:
    def ask(*turns: str, path: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns)]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "return_cache_report": True, **more}
        details: dict[str, Any] = post(fresh, path, body)["usage"]["prompt_tokens_details"]
        report: dict[str, Any] = details["cache_report"]
        assert report["cached_tokens"] == details["cached_tokens"]
        return report

    first = "Tell me of the ships at dawn. " + LONG
    assert ask(LONG, first)["reason"] == "new"
    assert ask(LONG, first)["reason"] == "complete"
    other = ask(LONG, "Tell me of the ships at noon. " + LONG, "Nobody.", "And at night?")
    assert (other["reason"], other["message"]) == ("differs", "messages[1]")
    assert other["detail"] == f"differs from a cached prompt at token {other['token']} (messages[1])"
    assert 0 <= other["token"] - other["cached_tokens"] < 32
    changed = ask("You keep bees. " + LONG, first)
    assert (changed["reason"], changed["message"], changed["cached_tokens"]) == ("differs", "messages[0]", 0)
    assert ask(LONG, first, "None.", "Really? " + LONG)["reason"] == "ends"
    assert ask(LONG, first, cache_salt="mine")["reason"] == "new", "others' salts tell nothing"
    assert ask(LONG, first, prompt_logprobs=0)["reason"] == "off"


def test_reports_of_the_other_routes(fresh: RunningServer) -> None:
    prompt = list(range(1000, 1100))
    body = {"prompt": prompt, "max_tokens": 1, "return_cache_report": True}
    post(fresh, "/v1/completions", body)
    body["prompt"] = [*prompt[:50], 7, *prompt[51:]]
    report = post(fresh, "/v1/completions", body)["usage"]["prompt_tokens_details"]["cache_report"]
    assert (report["reason"], report["token"], report["cached_tokens"]) == ("differs", 50, 48)
    several = {**body, "prompt": [prompt, prompt]}
    assert post(fresh, "/v1/completions", several, 400)["error"]["param"] == "return_cache_report"
    message = {"max_tokens": 1, "system": LONG, "messages": [{"role": "user", "content": "Who? " + LONG}]}
    assert "cache_report" not in post(fresh, "/v1/messages", message)["usage"]
    message["messages"] = [{"role": "user", "content": "When, and with which flag? " + LONG}]
    report = post(fresh, "/v1/messages", {**message, "return_cache_report": True})["usage"]["cache_report"]
    assert (report["reason"], report["message"]) == ("differs", "messages[0]")


def test_a_stream_ends_with_the_report(fresh: RunningServer) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 2, "return_cache_report": True, "stream": True}
    answer = httpx.post(f"{fresh.url}/v1/completions", json=body, timeout=120).text
    assert '"cache_report":{"reason":"new"' in answer.split("data: ")[-2]
