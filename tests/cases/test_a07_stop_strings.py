"""A07: a stop string at every place, wherever its tokens are cut; streamed and not; held text comes once, not twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.asking import answered, ask, events, streamed_text
from tests.server.running_server import RunningServer

STORY: dict[str, Any] = {
    "prompt": "Ben: Hello!\nAnna: Hello!\nBen:",
    "temperature": 0,
    "max_tokens": 30,
    "ignore_eos": True,
}


def first(text: str, stops: list[str]) -> tuple[int, str]:
    """Where the stop that is completed first begins; of those completed together the longest."""
    ends = {stop: text.index(stop) + len(stop) for stop in stops if stop in text}
    earliest = min(ends.values())
    stop = max((stop for stop, end in ends.items() if end == earliest), key=len)
    return earliest - len(stop), stop


@pytest.fixture(scope="module")
def free(case_server: RunningServer) -> str:
    text: str = answered(ask(case_server, **STORY))["choices"][0]["text"]
    assert len(text) > 40
    return text


def check(server: RunningServer, free: str, stops: list[str], include: bool) -> None:
    asked = {**STORY, "stop": stops, "include_stop_str_in_output": include}
    at, stop = first(free, stops)
    expected = free[: at + (len(stop) if include else 0)]
    choice = answered(ask(server, **asked))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    chunks = events(server, **asked)
    assert streamed_text(chunks) == expected
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [("stop", stop)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_every_cut(live_server: RunningServer, free: str, length: int, include: bool) -> None:
    starts = range(0, len(free) - length, 7)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(check, live_server, free, [free[at : at + length]], include) for at in starts]
        for future in running:
            future.result()


@pytest.mark.parametrize("include", [False, True])
def test_several_stops(live_server: RunningServer, free: str, include: bool) -> None:
    check(live_server, free, [free[8:12], free[8:10]], include)  # one is the beginning of the other
    check(live_server, free, [free[9:12], free[6:12], free[11:12]], include)  # completed together
    check(live_server, free, ["no such text", free[20:24], "\x00"], include)
    check(live_server, free, [free[5:9] + "?", free[5:14]], include)  # held for the one, stopped by the other


def test_held_text_comes_in_the_end(live_server: RunningServer, free: str) -> None:
    """Every prefix of the text is the beginning of a stop string that never comes."""
    for stop in (free + "!", free[-9:] + "!", free[10:] + "\x00"):
        asked = {**STORY, "stop": [stop]}
        choice = answered(ask(live_server, **asked))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (free, "length", None)
        assert streamed_text(events(live_server, **asked)) == free


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_stop_string(live_server: RunningServer, skip: bool) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 40,
        "stop": ["<|im_end|>"],
        "skip_special_tokens": skip,
    }
    choice = answered(ask(live_server, "/v1/chat/completions", **asked))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|im_end|>")
    assert "Paris" in choice["message"]["content"]
    assert "<|im_end|>" not in choice["message"]["content"]
