"""A13: no constraint takes long enough, anywhere, for others to notice; what would is a 400."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from tests.cases.asking import answered, ask, refused
from tests.server.running_server import RunningServer


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": 3}
    for level in range(depth):
        other = {"type": "object", "properties": {f"k{level}": {"type": "integer"}}, "required": [f"k{level}"]}
        schema = {"oneOf": [schema, other]}
    return schema


def chain(length: int) -> dict[str, Any]:
    names = {f"n{i}": {"properties": {"a": {"$ref": f"#/$defs/n{i + 1}"}}} for i in range(length)}
    return {"$defs": {**names, f"n{length}": {"type": "integer"}}, "$ref": "#/$defs/n0"}


RECURSIVE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}},
    "$ref": "#/$defs/node",
}
# What ends at some bound of llguidance takes as long as the machine is slow, and may reach --grammar-timeout before.
OR_TIME = "takes more than 5 s to compile"
# constraint, and words of its refusal, of which one is to be found; none: it must be served
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nested repetition": ({"regex": "(a{1,500}){1,500}"}, ()),
    "ambiguous repetition": ({"regex": "(x+x+)+y"}, ()),
    "oneOf 12 deep": ({"json": nested(12)}, ("write anyOf",)),
    "recursive $ref": ({"json": RECURSIVE}, ()),
    "$ref to itself": ({"json": {"$ref": "#"}}, ("no text can satisfy it",)),
    "1 MB of schema": ({"json": {"enum": [f"value {i}" for i in range(75_000)]}}, ("at most 131072",)),
    "1 MB of regex": ({"regex": "a" * 1_000_000}, ("at most 131072",)),
    "100k choices": ({"choice": [f"choice {i}" for i in range(100_000)]}, ("at most 10000",)),
    "seconds of work": ({"json": {"type": "integer", "multipleOf": 999_983}}, ("compile",)),  # too long, or too large
    "1500 $refs in a row": ({"json": chain(1500)}, ("nests too deeply",)),
    "a long forced text": ({"regex": "ab{60000}c"}, ()),
    "doubling rules": (
        {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"\n'},
        ("too big", OR_TIME),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_served_or_refused_in_bounded_time(live_server: RunningServer, name: str) -> None:
    given, words = CASES[name]
    response = ask(live_server, prompt="x", structured_outputs=given, max_tokens=4, temperature=0)
    if not words:
        assert answered(response)["choices"][0]["finish_reason"] in ("stop", "length")
    else:
        message = refused(response, f"structured_outputs.{next(iter(given))}")
        assert any(word in message for word in words), message


@pytest.mark.parametrize("name", ["bad_words", "allowed_token_ids"])
def test_lists_of_a_hundred_thousand_are_bounded_or_served(live_server: RunningServer, name: str) -> None:
    given = [f"w{i}" for i in range(100_000)] if name == "bad_words" else list(range(49_000)) * 2
    response = ask(live_server, prompt="x", max_tokens=2, **{name: given})
    assert response.status_code in (200, 400)


def test_plain_requests_go_on_meanwhile(live_server: RunningServer) -> None:
    """While one grammar takes its five seconds or all of its memory, plain requests are answered, again and again."""
    slow: list[httpx.Response] = []
    given = {"json": {"type": "integer", "multipleOf": 999_979}}
    thread = threading.Thread(
        target=lambda: slow.append(ask(live_server, prompt="x", structured_outputs=given, max_tokens=2))
    )
    thread.start()
    answers = 0
    while thread.is_alive():
        body = answered(ask(live_server, prompt="The capital of France is", max_tokens=2, temperature=0))
        assert "Paris" in body["choices"][0]["text"]
        quick = ask(live_server, prompt="x", structured_outputs={"regex": f"a{{{1 + answers % 50}}}"}, max_tokens=2)
        assert answered(quick)["choices"][0]["text"].startswith("a")
        answers += 1
    thread.join()
    refused(slow[0], "structured_outputs.json", "compile")  # too long, or too large
    assert answers >= 2  # were they held up, the first one would have been answered behind the grammar, and no other


def test_a_grammar_that_compiles_for_a_while_in_the_core_holds_up_nobody(live_server: RunningServer) -> None:
    """One that the checker lets pass: the core compiles it beside the steps, and its request waits alone."""
    given = {"json": {"type": "integer", "multipleOf": 10_007}}
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(answered(ask(live_server, prompt="x", structured_outputs=given, max_tokens=40)))
    )
    thread.start()
    while thread.is_alive():
        answered(ask(live_server, prompt="The capital of France is", max_tokens=2, temperature=0))
    thread.join()
    choice = results[0]["choices"][0]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["text"]) % 10_007 == 0
