"""A06: characters of several tokens, while text is held back for a stop string: whole characters, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.asking import answered, ask, events, streamed_text
from tests.server.running_server import RunningServer

COPY = {
    "kana": "さくら、もみじ、さくら、もみじ、さくら、もみじ、さくら、",
    "emoji": "\U0001f60a\U0001f680" * 9,
    "mixed": "é\U0001f680ж漢 é\U0001f680ж漢 é\U0001f680ж漢 é\U0001f680ж漢 é",
}


@pytest.mark.parametrize("stop", [["ZZZ"], ["\U0001f9ff", "もみの"], []])
@pytest.mark.parametrize("text", COPY)
def test_the_stream_is_the_text(live_server: RunningServer, text: str, stop: list[str]) -> None:
    asked: dict[str, Any] = {"prompt": COPY[text], "temperature": 0, "max_tokens": 48, "ignore_eos": True, "stop": stop}
    choice = answered(ask(live_server, **asked, return_token_ids=True))["choices"][0]
    chunks = events(live_server, **asked)
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == choice["text"]
    body = choice["text"].rstrip("\ufffd")  # the last character may be cut by max_tokens
    assert "\ufffd" not in body
    assert len(choice["text"]) - len(body) <= 1
    assert not any("\ufffd" in piece for piece in pieces[:-2])
    assert len(choice["token_ids"]) > len(body) or text == "mixed"  # characters did come in parts
    assert len(body.encode()) > len(body)


def test_a_token_that_is_a_replacement_character(live_server: RunningServer) -> None:
    """U+FFFD that the model does write is text like any other."""
    ids = answered(ask(live_server, "/tokenize", prompt="a\ufffdb", add_special_tokens=False))["tokens"]
    assert answered(ask(live_server, "/detokenize", tokens=ids)) == {"prompt": "a\ufffdb"}
    asked = {"prompt": "\ufffd" * 12, "temperature": 0, "max_tokens": 24, "stop": ["ZZZ"], "ignore_eos": True}
    whole = answered(ask(live_server, **asked))["choices"][0]["text"]
    assert streamed_text(events(live_server, **asked)) == whole


def test_half_a_character_is_held_until_the_end(live_server: RunningServer) -> None:
    """Tokens of lone lead bytes: nothing is shown until it is known that the character will never be whole."""
    ids = answered(ask(live_server, "/tokenize", prompt="\U0001f9ed", add_special_tokens=False))["tokens"]
    assert len(ids) > 1
    asked: dict[str, Any] = {"prompt": "x", "allowed_token_ids": ids[:1], "max_tokens": 3, "stop": ["ZZZ"]}
    pieces = [c["choices"][0]["text"] for c in events(live_server, **asked, temperature=0)]
    whole = answered(ask(live_server, **asked, temperature=0))["choices"][0]["text"]
    assert "".join(pieces) == whole
    assert set(whole) == {"\ufffd"}
