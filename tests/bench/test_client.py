"""The client against a server made of bytes: however they are cut, and whatever is wrong with them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.client import Capture, Client, body_pieces, read_answer
from octavo.bench.datasets import BenchRequest
from octavo.bench.load import LoadConfig, request_body, send_load, wait_until_ready
from octavo.exceptions import ConfigError, RequestError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}], **more}).encode() + b"\n\n"


def usage_event(prompt: int, completion: int, cached: int = 0) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    body = {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunked(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in payloads) + b"0\r\n\r\n"


def capture(*pieces: bytes) -> Capture:
    """Piece i arrives at i + 1 seconds; the request was sent at 0."""
    return Capture(0.0, 7, [(i + 1.0, piece) for i, piece in enumerate(pieces)])


def frame(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def test_each_token_has_the_time_of_its_chunk() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    got = read_answer(
        capture(
            HEAD,
            frame(role),  # no token yet
            frame(event("a")),
            frame(event("b")),
            frame(event("")),  # the end of the answer, without text
            frame(usage_event(5, 2, 4)) + chunked(DONE),
        )
    )
    assert got.error is None
    assert got.arrivals == [3.0, 4.0]
    assert (got.prompt_tokens, got.output_tokens, got.cached_tokens) == (5, 2, 4)


def test_running_usage_counts_the_tokens_of_a_chunk() -> None:
    usage = [{"usage": {"completion_tokens": n, "prompt_tokens": 7}} for n in (1, 4, 4)]
    first, second, third = (event(text, **more) for text, more in zip(("a", "bcd", ""), usage))
    got = read_answer(capture(HEAD + frame(first), frame(second), frame(third), chunked(DONE)))
    assert got.arrivals == [1.0, 2.0, 2.0, 2.0]
    assert got.itl == [1.0, 0.0, 0.0]
    assert got.output_tokens == 4


@given(st.lists(st.integers(1, 400), max_size=12), st.booleans())
def test_any_cut_gives_the_same_answer(cuts: list[int], in_one_chunk: bool) -> None:
    payloads = [event("é"), event("b"), event("c"), usage_event(9, 3), DONE]
    whole = HEAD + chunked(*([b"".join(payloads)] if in_one_chunk else payloads))
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    got = read_answer(capture(*(whole[a:b] for a, b in itertools.pairwise(places))))
    assert got.error is None
    assert len(got.arrivals) == 3
    assert got.arrivals == sorted(got.arrivals)
    assert got.prompt_tokens == 9


@given(st.integers(1, 10_000))
def test_an_answer_cut_short_is_an_error(place: int) -> None:
    whole = HEAD + chunked(event("a"), event("b"), DONE)
    place = 1 + place % (len(whole) - len(b"\r\n") - 1)  # the last CRLF may be missing: all has been said by then
    assert read_answer(capture(whole[:place])).error is not None


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "before an answer"),
        ([b"SSH-2.0-x\r\n\r\n"], "not an HTTP answer"),
        ([b'HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n{"a":"b"}'], 'HTTP 404: {"a":"b"}'),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"], "in the middle"),
        ([HEAD + chunked(event("a"), b'data: {"error":{"message":"boom"}}\n\n', DONE)], "boom"),
        ([HEAD + chunked(event("a"))], "without \\[DONE\\]"),
        ([HEAD + chunked(DONE)], "no token"),
        ([HEAD + chunked(b"data: {\n\n", DONE)], "Expecting"),
    ],
)
def test_what_is_wrong_is_said(pieces: Sequence[bytes], message: str) -> None:
    got = read_answer(capture(*pieces))
    assert got.error is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(got.error)


def test_a_body_without_chunks() -> None:
    status, pieces = body_pieces([(1.0, b"HTTP/1.1 200 OK\r\nContent-Le"), (2.0, b"ngth: 4\r\n\r\nab"), (3.0, b"cd")])
    assert status == 200
    assert b"".join(data for _, data in pieces) == b"abcd"


def test_addresses() -> None:
    request = Client("http://127.0.0.1:8000/v1", api_key="k").encode("POST", "/v1/completions", {"a": 1})
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert b"Authorization: Bearer k\r\n" in request
    assert request.endswith(b'Content-Length: 8\r\n\r\n{"a": 1}')
    assert Client("http://h/proxy").encode("GET", "/health").startswith(b"GET /proxy/health ")
    with pytest.raises(ConfigError, match="base-url"):
        Client("127.0.0.1:8000")


class ByteServer:
    """Answers the n-th POST with ``answers[n % len]``, GETs with 200, and remembers the most requests at a time."""

    def __init__(self, *answers: bytes) -> None:
        self.answers, self.posts, self.running, self.peak = answers, 0, 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        answer = b'HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n{"data": [{"id": "tiny"}]}'
        if head.startswith(b"POST"):
            answer = self.answers[self.posts % len(self.answers)]
            self.posts += 1
            self.running += 1
            self.peak = max(self.peak, self.running)
            await asyncio.sleep(0.01)
            self.running -= 1
        writer.write(answer)
        await writer.drain()
        writer.close()


async def test_load_keeps_to_its_concurrency_and_counts_failures() -> None:
    good = HEAD + chunked(event("a"), event("b"), usage_event(3, 2), DONE)
    bad = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy"
    handler = ByteServer(good, good, bad)
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await wait_until_ready(client, 10)
        dataset = [BenchRequest((1000, 1001, 1002), 2)] * 12
        config = LoadConfig(model="tiny", max_concurrency=3, num_warmups=0)
        result = await send_load(client, dataset, config)
    assert handler.posts == 12
    assert handler.peak == 3
    assert [record.error for record in result.records].count(None) == 8
    assert {record.error for record in result.records if record.error} == {"HTTP 503: busy"}


async def test_a_failed_warm_up_ends_it() -> None:
    bad = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno"
    async with await asyncio.start_server(ByteServer(bad), "127.0.0.1", 0) as server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(RequestError, match="HTTP 400: no"):
            await send_load(client, [BenchRequest((1000,), 2)], LoadConfig())


async def test_nobody_there() -> None:
    async with await asyncio.start_server(ByteServer(b""), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    with pytest.raises(RequestError, match="does not answer"):
        await wait_until_ready(Client(f"http://127.0.0.1:{port}"), 0)


async def test_a_server_that_hangs_is_given_up() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.05)
        got = await client.exchange(client.encode("GET", "/"))
    assert got.failure is not None
    assert "no complete answer" in got.failure


def test_bodies() -> None:
    request = BenchRequest((1000, 1001), 5)
    body = request_body(request, LoadConfig(model="m", ignore_eos=True, extra_body={"top_k": 1}))
    assert body["prompt"] == [1000, 1001]
    assert (body["max_tokens"], body["ignore_eos"], body["top_k"], body["stream"]) == (5, True, 1, True)
    chat = request_body(request, LoadConfig(backend="openai-chat", continuous_usage=True))
    assert len(chat["messages"][0]["content"].split()) == 2
    assert chat["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "prompt" not in chat
